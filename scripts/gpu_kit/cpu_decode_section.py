"""Section `cpu-decode`: prompts computed on the accelerator, decoded in a CPU process; then the same by the CPU alone."""

from __future__ import annotations

from bench_kit.model import Prompts

from gpu_kit.findings import Findings
from gpu_kit.questions import Question, ask
from gpu_kit.servers import DEAD_AFTER_S, check_compiles, end, engine_flags, servers
from gpu_kit.setting import Setting

NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 48, 24
COMMON = ("--kv-transfer-backend", "grpc", "--no-enable-prefix-caching")
DEMO = (
    *("--model", "demo", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4", "--num-pages", "256"),
    *("--max-num-batched-tokens", "64", "--transfer-chunk-tokens", "32", "--dead-after-s", str(DEAD_AFTER_S)),
)


def run(setting: Setting, findings: Findings) -> None:
    """See Section. Two platforms round differently: how far their tokens agree is told, not judged."""
    flags = (*(engine_flags(setting) if setting.small else DEMO), *COMMON)
    prompts = Prompts(21)
    asked = [
        Question(prompt=tuple(prompts.next(PROMPT_TOKENS)), max_tokens=OUTPUT_TOKENS, temperature=0.0, seed=0)
        for _ in range(NUM_PROMPTS)
    ]
    with servers(setting) as started:
        producer, address = started.launch("prefill", "--role", "prefill", *flags)
        on_cpu = {"JAX_PLATFORMS": "cpu"}
        consumer, _ = started.launch("decode", "--role", "decode", "--prefill", address, *flags, env=on_cpu)
        prefill, decode = started.wait(producer), started.wait(consumer)
        findings.fact(P_bits=prefill.ready.bits or "", D_bits=decode.ready.bits or "")
        decode.wait_for_peer(setting.clock.left_s())
        together = ask(decode.client, asked, NUM_PROMPTS)
        counted = decode.counters()
        findings.check("KV crossed from one platform to the other", counted["jdisagg_transfer_bytes_total"] > 0)
        findings.check("D computed no prompt", counted["jdisagg_prefill_tokens_total"] == 0)
        end(prefill, findings, "P")
        alone = ask(decode.client, asked, NUM_PROMPTS)
        computed = decode.counters()["jdisagg_prefill_tokens_total"]
        findings.check("without P, D computes the prompts", computed >= NUM_PROMPTS * PROMPT_TOKENS, f"{computed:g} tokens")
        pairs = list(zip(together, alone, strict=True))
        findings.fact(
            streams=NUM_PROMPTS,
            streams_equal_to_cpu_alone=sum(a.token_ids == b.token_ids for a, b in pairs),
            first_tokens_equal=sum(a.token_ids[0] == b.token_ids[0] for a, b in pairs),
        )
        check_compiles(decode, findings, "D")
        end(decode, findings, "D")
