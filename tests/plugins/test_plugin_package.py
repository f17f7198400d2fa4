"""A third-party distribution: installed into an environment of its own, found by name, and does what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from model_free import ModelFree
from tiny_models import save_tiny

PACKAGE = Path(__file__).parents[2] / "examples" / "plugin_package"
README = (Path(__file__).parents[2] / "plugins" / "README.md").read_text()


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


# Tells what becomes of each plugin and options, and which plugins there are where none are wanted.
PROGRAM = """
import json, os, sys
from paged_backend import Engine, SamplingParams
from paged_backend.policy.plugin_manager import PluginManager
folder, asked = sys.argv[1], json.loads(sys.argv[2])
info = {info.name: info for info in PluginManager().describe()}
reports = {}
for plugin, options in asked.items():
    engine = Engine.from_pretrained(folder, kv_cache_memory="8MiB", **options)
    output, = engine.generate(["Once upon"], SamplingParams(max_tokens=6, ignore_eos=True))
    reports[plugin] = {"source": info[plugin].source, "location": info[plugin].location, "tokens": output.token_ids,
                       "policy": type(engine.scheduler.policy.policy).__name__, "errors": engine.stats().policy_errors}
os.environ["PAGED_BACKEND_PLUGINS"] = ""
print(json.dumps({"reports": reports, "unwanted": [info.name for info in PluginManager().describe()]}))
"""


class Environment:
    """An environment of its own that sees what this one has, as if all requirements had been installed there too."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "environment", with_pip=False, symlinks=True)
        self.python = folder / "environment" / "bin" / "python"
        self.model = save_tiny(folder / "model")
        asked = [self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        self.packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        seen = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
        (self.packages / "requirements.pth").write_text("".join(lines))

    def install(self, source: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        done = subprocess.run([*command, "--target", self.packages, source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(self, asked: dict[str, dict], **variables: str) -> tuple[dict, str]:
        """What the program tells, and what it wrote to stderr."""
        command = [self.python, "-c", PROGRAM, self.model, json.dumps(asked)]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """The example's package and the one of the README, installed into one environment, and what a program finds."""
    folder = tmp_path_factory.mktemp("installed")
    environment = Environment(folder)
    # Building writes into the source folder.
    environment.install(shutil.copytree(PACKAGE, folder / "example"))
    written = folder / "written"
    written.mkdir()
    for name, text in re.findall(r"^```\w+\n# (my_policies\.py|pyproject\.toml)\n(.*?)^```", README, re.DOTALL | re.M):
        (written / name).write_text(text)
    environment.install(written)
    options = {"scheduler": "shortest_predicted", "scheduler_options": {"aging": 5.0}, "eviction": "by_class"}
    asked = {"shortest": options, "my_policies": {"scheduler": "short_prompts_first"}}
    found, log = environment.run(asked, PAGED_BACKEND_SLOW_REQUEST_S="0")
    for report in found["reports"].values():
        assert Path(report["location"]).is_relative_to(environment.packages)
        assert report["errors"] == {}
        assert len(report["tokens"]) == 6
    return found, log


@pytest.mark.slow
def test_installed_package_is_found_by_name_in_an_environment_of_its_own(installed):
    report = installed[0]["reports"]["shortest"]
    assert report["source"] == "paged-backend-shortest 0.1.0"
    assert report["policy"] == "ShortestPredicted"
    assert "took" in installed[1]


@pytest.mark.slow
def test_package_written_from_the_readme_alone_installs_and_runs(installed):
    report = installed[0]["reports"]["my_policies"]
    assert report["source"] == "my-policies 0.1.0"
    assert report["policy"] == "ShortPromptsFirst"


@pytest.mark.slow
def test_installed_packages_are_left_alone_where_no_plugin_is_wanted(installed):
    assert installed[0]["unwanted"]
    assert {"shortest", "my_policies"}.isdisjoint(installed[0]["unwanted"])
