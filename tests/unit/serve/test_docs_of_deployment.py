"""The page on deployment: its files have settings that load and agree, and what it quotes the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from jdisagg.core.config import ServerConfig
from jdisagg.core.metrics import Metrics
from jdisagg.core.settings import load_config

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/deployment.md").read_text()
NEEDED_S = ServerConfig().drain_s + 15  # to end
UPSTREAMS = {"jdisagg_grpc", "jdisagg_http"}  # of nginx: no metrics


def blocks(language: str) -> list[str]:
    """Of the page on deployment."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def manifests() -> dict[tuple[str, str], Any]:
    """By kind and name."""
    objects = [one for text in blocks("yaml") for one in yaml.safe_load_all(text) if "kind" in one]
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def test_containers_of_the_manifests_have_settings_that_load() -> None:
    lists = re.findall(r"\bargs: (\[.*?\])", TEXT, re.DOTALL)
    manifests = [[flag.replace("$(POD_IP)", "fd00::7") for flag in json.loads(text)] for text in lists]
    assert [load_config(argv, {}).role for argv in manifests] == ["router", "prefill"]
    decode = [flag.replace("prefill", "decode") for flag in manifests[1]]
    assert load_config(decode, {}).role == "decode"


def test_files_of_hosts_have_settings_that_load(tmp_path: Path) -> None:
    """The TOML files, and what the units add to them."""
    (tmp_path / "key").write_text("k\n")
    (tmp_path / "client-keys").write_text("c\n")
    files = {}
    for text in blocks("toml"):
        for there, here in (("/etc/jdisagg/api-key", "key"), ("/etc/jdisagg/client-api-keys", "client-keys")):
            text = text.replace(there, str(tmp_path / here))
        name = "router" if "client_api_key" in text else "worker"
        files[name] = tmp_path / f"{name}.toml"
        files[name].write_text(text)
    commands = re.findall(r"^ExecStart=\S+ -m jdisagg\.serve (.*)$", "\n".join(blocks("ini")), re.MULTILINE)
    assert len(commands) == len(files) == 2
    for command in commands:
        argv = command.replace("%i", "3").split()
        name = Path(argv[1]).stem
        config = load_config(["--config", str(files[name]), *argv[2:]], {})
        assert config.server.port == (8013 if name == "worker" else 8000)
        assert len(config.server.router) == (2 if name == "worker" else 0)


def test_time_to_end_is_longer_than_a_drain() -> None:
    waits = [float(seconds) for seconds in re.findall(r"(?:TimeoutStopSec=|--stop-timeout )(\d+)", TEXT)]
    assert len(waits) == 4
    for (kind, _), one in manifests().items():
        if kind == "Deployment":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
            waits.append(one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] - float(command[1]))
    assert all(wait_s >= NEEDED_S for wait_s in waits), waits


def test_what_selects_pods_selects_those_of_the_manifests() -> None:
    labels = {
        name: one["spec"]["template"]["metadata"]["labels"] for (kind, name), one in manifests().items() if kind == "Deployment"
    }
    for (kind, name), one in manifests().items():
        if kind in ("Service", "Deployment", "PodDisruptionBudget"):
            selector = one["spec"]["selector"]
            assert selector.get("matchLabels", selector) in labels.values(), name
    keys = re.findall(r"--from-literal=([\w-]+)=", TEXT)
    assert set(re.findall(r"secretKeyRef: {name: jdisagg, key: ([\w-]+)}", TEXT)) == set(keys)


def test_jobs_that_are_scraped_have_names_that_the_alerts_look_for() -> None:
    (scraped,) = [one for text in blocks("yaml") for one in yaml.safe_load_all(text) if "scrape_configs" in one]
    (wanted,) = re.findall(r'up{job=~"([^"]+)"}', (ROOT / "configs/prometheus/jdisagg.yml").read_text())
    names = [job["job_name"] for job in scraped["scrape_configs"]]
    assert names
    assert all(re.fullmatch(wanted, name) for name in names)


def test_what_troubleshooting_quotes_is_said_by_the_code() -> None:
    section = TEXT.partition("\n## When something is wrong\n")[2]
    quoted = set(re.findall(r'"([a-z][^"|`]{6,})"', re.sub(r"`[^`]*`", "", section)))
    sources = "".join(path.read_text() for path in sorted((ROOT / "jdisagg").rglob("*.py")))
    assert len(quoted) > 15
    assert [text for text in sorted(quoted) if text not in sources] == []


def test_metrics_that_deployment_asks_for_exist() -> None:
    shown = {line.split()[2] for line in Metrics().text().splitlines() if line.startswith("# TYPE")}
    asked = {re.sub("_(sum|bucket|count)$", "", name) for name in re.findall(r"\bjdisagg_\w+", TEXT)}
    assert asked - UPSTREAMS <= shown
