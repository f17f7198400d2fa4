"""The command line as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app
from paged_backend.errors import PluginError
from paged_backend.policy.plugin_manager import KINDS, PluginManager

PLUGIN = """
from paged_backend import hookimpl
from paged_backend.policies import KeyedPolicy

class Backwards(KeyedPolicy):
    def key(self, request):
        return -request.order

@hookimpl
def register_schedulers(register):
    register("backwards", Backwards)
"""


def invoke(*arguments: str) -> Result:
    # Wide enough that no table cell and no message is wrapped.
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, arguments)


def install_distribution(site: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put a distribution with one plugin on the path, as pip would."""
    (site / "backwards.py").write_text(source)
    info = site / "backwards_policies-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards-policies\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[paged_backend]\nbackwards-plugin = backwards\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "backwards", raising=False)


def test_the_version_is_that_of_the_distribution() -> None:
    assert invoke("--version").output == f"paged-backend {version('paged-backend')}\n"


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert {"demo", "plugins"} <= set(names)
    for name in names:
        assert f" {name} " in result.output


@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
def test_help_says_something_of_a_command_and_of_every_flag_it_has(command: str) -> None:
    found = typer.main.get_command(app).commands[command]
    assert found.help
    assert [parameter.name for parameter in found.params if not getattr(parameter, "help", None)] == []
    output = invoke(command, "--help").output
    assert all(option in output for parameter in found.params for option in parameter.opts)


def test_a_shell_is_told_how_a_word_can_go_on() -> None:
    """As bash asks, by the name that the command has after it is installed."""
    words = {"COMP_WORDS": "paged-backend do", "COMP_CWORD": "1", "_PAGED_BACKEND_COMPLETE": "complete_bash"}
    result = subprocess.run(
        [sys.executable, "-m", "paged_backend"], capture_output=True, text=True, env={**os.environ, **words}
    )
    assert result.stdout.split() == ["doctor"]


def test_completion_can_be_shown_and_installed() -> None:
    output = invoke("--help").output
    assert "--install-completion" in output
    assert "--show-completion" in output


def test_without_a_command_help_is_shown() -> None:
    assert "Usage" in invoke().output


def test_plugins_lists_every_built_in_policy_as_our_own() -> None:
    rows = [
        line for line in invoke("plugins").output.splitlines() if f"paged-backend {version('paged-backend')}" in line
    ]
    manager = PluginManager(load_entry_points=False)
    expected = [(kind, name, plugin) for kind in KINDS for name, plugin in manager.names(kind).items()]
    assert len(expected) >= 2
    for policy in expected:
        assert any(tuple(cell.strip() for cell in row.split("│")[1:4]) == policy for row in rows), policy


def test_plugins_names_the_distribution_of_an_installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_distribution(tmp_path, monkeypatch, PLUGIN)
    (row,) = [line for line in invoke("plugins").output.splitlines() if "backwards-plugin" in line]
    assert [cell.strip() for cell in row.split("│")[1:5]] == [
        "scheduler",
        "backwards",
        "backwards-plugin",
        "backwards-policies 1.2",
    ]


def test_plugins_as_json_are_those_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_distribution(tmp_path, monkeypatch, PLUGIN)
    told = json.loads(invoke("plugins", "--json").stdout)
    by_name = {plugin["name"]: plugin for plugin in told}
    assert by_name["backwards-plugin"]["names"]["scheduler"] == ["backwards"]
    assert by_name["backwards-plugin"]["source"] == "backwards-policies 1.2"
    assert by_name["backwards-plugin"]["error"] is None
    manager = PluginManager(load_entry_points=False)
    for kind in KINDS:
        assert set(manager.names(kind)) <= {name for plugin in told for name in plugin["names"][kind]}


def test_plugins_shows_which_hooks_a_plugin_without_policies_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from paged_backend import hookimpl\n\n@hookimpl\ndef step_finished(stats):\n    pass\n"
    install_distribution(tmp_path, monkeypatch, source)
    (row,) = [line for line in invoke("plugins").output.splitlines() if "backwards-plugin" in line]
    assert [cell.strip() for cell in row.split("│")[1:3]] == ["no policy", "step_finished"]


def test_a_plugin_that_cannot_be_loaded_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_distribution(tmp_path, monkeypatch, "raise ImportError('no such thing')")
    reason = "plugin 'backwards-plugin' (backwards) cannot be loaded: ImportError('no such thing')"
    # Asked for by name or not, the others are listed, and it with what is wrong with it.
    for wanted in ("backwards-plugin", None):
        if wanted is None:
            monkeypatch.delenv("PAGED_BACKEND_PLUGINS")
        else:
            monkeypatch.setenv("PAGED_BACKEND_PLUGINS", wanted)
        result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(app, ["plugins"])
        assert result.exit_code == 0
        (row,) = [line for line in result.stdout.splitlines() if "broken" in line]
        kind, why, plugin, source = (cell.strip() for cell in row.split("│")[1:5])
        assert (kind, plugin, source) == ("broken", "backwards-plugin", "backwards-policies 1.2")
        assert why.startswith(reason)
        assert "fifo" in result.stdout


def test_plugins_lists_all_where_two_plugins_offer_one_name_and_other_commands_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_distribution(tmp_path, monkeypatch, PLUGIN.replace('"backwards"', '"fifo"'))
    result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(app, ["plugins"])
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if "broken" in line]
    assert "scheduler 'fifo' is registered by both paged_backend.plugins.schedulers and backwards-plugin" in row
    assert "starvation_aware" in result.stdout
    with pytest.raises(PluginError, match="scheduler 'fifo' is registered by both"):
        PluginManager()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("What is this?", "is not JSON"),
        (json.dumps({"prompt": "a"}), "must hold a JSON list of texts"),
        (json.dumps([]), "must hold a JSON list of texts"),
        (json.dumps(["a", "  "]), "none of them empty"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    result = invoke("demo", "--prompts", str(file))
    assert result.exit_code == 2
    assert message in result.output


def test_a_byte_order_mark_before_the_prompts_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(["a"]), encoding="utf-8-sig")
    result = invoke("demo", "--prompts", str(file), "--model", str(tmp_path))
    assert "holds no model" in result.output


def test_a_model_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = invoke("demo", "--model", str(tmp_path / "nothing"))
    assert result.exit_code == 2
    assert f"there is no folder '{tmp_path / 'nothing'}'" in result.output


def test_a_folder_without_a_model_is_told_to_the_demo_in_words(tmp_path: Path) -> None:
    result = invoke("demo", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "holds no model, for it has no config.json" in result.output


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from paged_backend.cli.app import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("module", ["paged_backend", "paged_backend.cli"])
def test_the_module_can_be_run_as_the_command(module: str) -> None:
    result = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout == f"paged-backend {version('paged-backend')}\n"


def test_a_command_that_fails_says_so_with_its_exit_code(tmp_path: Path) -> None:
    arguments = ["generate", str(tmp_path / "nothing.txt")]
    result = subprocess.run([sys.executable, "-m", "paged_backend", *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert "nothing.txt" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_onto_a_full_disk_is_an_error_in_words() -> None:
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "paged_backend", "--help"]
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_help_is_shown_in_an_encoding_that_cannot_write_all_of_it() -> None:
    arguments = [sys.executable, "-m", "paged_backend", "replay", "--help"]
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "60"}
    result = subprocess.run(arguments, capture_output=True, text=True, env=narrow)
    assert result.stderr == ""
    assert "--length-k?" in result.stdout
    assert result.returncode == 0


def test_the_process_leaves_with_its_code_after_all_that_is_called_at_exit() -> None:
    code = (
        "import atexit, sys\n"
        "from paged_backend.cli import app as cli\n"
        "@cli.app.command()\n"
        "def last():\n"
        "    class Told:\n"
        "        def __del__(self): print('collected', file=sys.stderr)\n"
        "    sys.kept = [Told()]\n"
        "    sys.kept.append(sys.kept)\n"
        "    atexit.register(print, 'called at exit')\n"
        "    raise SystemExit(7)\n"
        "sys.argv = ['paged-backend', 'last']\n"
        "cli.run()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 7
    assert result.stdout == "called at exit\n"
    assert result.stderr == ""


def test_without_its_extra_the_command_says_what_to_install() -> None:
    code = "import sys\nsys.modules['typer'] = None\nimport paged_backend.cli.app"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "the command line needs the typer package: pip install 'paged-backend[cli]'\n"
