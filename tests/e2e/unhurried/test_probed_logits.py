"""`exact` to the last bit of the logits: what the sampler is given does not depend on the way of serving."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.e2e.client import run_all
from tests.e2e.conftest import MAX_MODEL_LEN, PATIENT, Start
from tests.e2e.mixed import VOCAB, mixed_requests
from tests.e2e.probed_serve import PROBE_DIR
from tests.e2e.processes import ServerProcess

PROBES = (5, 8, 20, 33)  # of the mixed load: n = 3; penalties; a repetition penalty; stop ids
POSITIONS = 20
Logits = dict[str, np.ndarray]


class Probed:
    """Starts probed servers, each with a directory of its own."""

    def __init__(self, start: Start, directory: Path, flags: tuple[str, ...]) -> None:
        self._start, self._directory, self._flags = start, directory, flags

    def server(self, name: str, *flags: str) -> ServerProcess:
        (self._directory / name).mkdir()
        env = {PROBE_DIR: str(self._directory / name)}
        return self._start(name, *flags, *self._flags, env=env, module="tests.e2e.probed_serve").wait_ready()

    def logits(self, *names: str) -> Logits:
        files = [file for name in names for file in (self._directory / name).glob("*.npy")]
        return {file.stem: np.load(file) for file in files}


def ask(address: str) -> None:
    """The mixed load around the probed requests: what they share steps with differs from server to server."""
    load = mixed_requests(40, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
    for number, asked in enumerate(load):
        if number in PROBES:
            asked.request_id = f"probe{number}"
            asked.sampling |= {"ignore_eos": True, "max_tokens": 6, "stop_token_ids": []}
    assert all(got.error is None for got in run_all(address, load))


def test_probed_logits_are_equal_to_the_last_bit(start: Start, tmp_path: Path, exact_flags: tuple[str, ...]) -> None:
    probed = Probed(start, tmp_path, (*exact_flags, *PATIENT, "--no-enable-prefix-caching"))
    ask(probed.server("unified", "--role", "unified").grpc)
    ask(probed.server("colocated", "--role", "colocated", "--local-prefill", "never").grpc)
    prefill = probed.server("prefill", "--role", "prefill")
    ask(probed.server("decode", "--role", "decode", "--prefill", prefill.grpc, "--local-prefill", "never").grpc)
    reference = probed.logits("unified")
    assert len(reference) == 6 * 6 >= POSITIONS  # 4 requests, one of them with n = 3
    assert len({logits.tobytes() for logits in reference.values()}) > POSITIONS
    assert all(np.isfinite(logits).all() and logits.std() > 0 for logits in reference.values())
    for others in (probed.logits("colocated"), probed.logits("prefill", "decode")):
        assert others.keys() == reference.keys()
        for position, logits in reference.items():
            assert others[position].dtype == np.float32
            assert others[position].tobytes() == logits.tobytes(), position
    assert probed.logits("prefill").keys() < reference.keys(), "first tokens come from P"
    print(f"\n{len(reference)} probed positions: unified = colocated = prefill + decode, {logits.size} float32 each")
