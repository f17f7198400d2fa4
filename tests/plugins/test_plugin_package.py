"""A third-party distribution: installed into an environment of its own, found by name, and does what it says."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from model_free import ModelFree
from tiny_folder import save_tiny

PACKAGE = Path(__file__).parents[2] / "examples" / "plugin_package"


@pytest.fixture
def policies(monkeypatch):
    """The package's policies, imported from where they lie."""
    monkeypatch.syspath_prepend(PACKAGE)
    from paged_backend_shortest import policies

    yield policies
    for name in [name for name in sys.modules if name.startswith("paged_backend_shortest")]:
        del sys.modules[name]


def test_shortest_predicted_learns_what_a_client_asks_for(policies):
    engine = ModelFree(policies.ShortestPredicted(), max_num_seqs=1)
    for client, output in [("terse", 2), ("chatty", 30)]:
        engine.add(4, output, max_tokens=50, client_id=client)
    engine.run()
    engine.starts.clear()
    first = engine.add(4, 3)
    engine.step()
    chatty = engine.add(4, 30, max_tokens=50, client_id="chatty")
    terse = engine.add(4, 2, max_tokens=50, client_id="terse")
    engine.run()
    assert engine.start_orders == [first.order, terse.order, chatty.order]
    engine.assert_sound()


def test_shortest_predicted_lets_nobody_wait_for_ever(policies):
    engine = ModelFree(policies.ShortestPredicted(aging=1000.0), max_num_seqs=1)
    engine.add(4, 4)
    long = engine.add(60, 4)
    for _ in range(40):
        engine.add(4, 2)
        engine.step()
        engine.step()
    assert long.is_finished
    for started, waiting in engine.starts:
        for request in waiting:
            shorter_by = request.num_tokens + request.params.max_tokens - started.num_prompt_tokens
            assert started.arrival_time - request.arrival_time <= shorter_by / 1000.0


def test_by_class_keeps_urgent_prefixes_longest(policies):
    from paged_backend.policies import CachedBlock

    policy = policies.ByClass()
    blocks = [CachedBlock(n, 0, 0, n, float(n), priority) for n, priority in enumerate((0, 2, 1, 2))]
    for block in blocks:
        policy.add(block)
    order = []
    for _ in blocks:
        order.append(policy.evict())
        policy.remove(blocks[order[-1]])
    assert order == [1, 3, 2, 0]


PROGRAM = """
import json, sys
from paged_backend import Engine, SamplingParams
from paged_backend.plugin_manager import PluginManager
plugin = {info.name: info for info in PluginManager().describe()}["shortest"]
engine = Engine.from_pretrained(sys.argv[1], scheduler="shortest_predicted", scheduler_options={"aging": 5.0},
                                eviction="by_class", kv_cache_memory="8MiB")
output, = engine.generate(["Once upon"], SamplingParams(max_tokens=6, ignore_eos=True))
print(json.dumps({"source": plugin.source, "location": plugin.location, "tokens": output.token_ids,
                  "policy": type(engine.scheduler.policy.policy).__name__, "errors": engine.stats().policy_errors}))
"""


@pytest.mark.slow
def test_installed_package_is_found_by_name_in_an_environment_of_its_own(tmp_path):
    folder = save_tiny(tmp_path / "model")
    # An empty environment that sees what this one has, as if all requirements had been installed there too.
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    packages = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
        ).stdout.strip()
    )
    seen = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (packages / "requirements.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen))
    # Building writes into the source folder.
    source = shutil.copytree(PACKAGE, tmp_path / "source")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*install, "--target", packages, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def run(**variables: str) -> subprocess.CompletedProcess:
        variables = {**os.environ, "PAGED_BACKEND_SLOW_REQUEST_S": "0", **variables}
        return subprocess.run([python, "-c", PROGRAM, folder], capture_output=True, text=True, env=variables)

    result = run()
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["source"] == "paged-backend-shortest 0.1.0"
    assert Path(report["location"]).is_relative_to(packages)
    assert report["policy"] == "ShortestPredicted"
    assert report["errors"] == {}
    assert len(report["tokens"]) == 6
    assert "took" in result.stderr
    limited = run(PAGED_BACKEND_PLUGINS="")
    assert limited.returncode != 0
