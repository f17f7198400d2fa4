"""Finding plugins, and turning what a user writes into a policy."""

from __future__ import annotations

import importlib.metadata
from types import ModuleType, SimpleNamespace

import pytest

from paged_backend import HOOK_API_VERSION, Engine, SamplingParams, hookimpl, kernels
from paged_backend.errors import ConfigError, PluginError, RequestRefused, UnknownPolicy, UnsupportedModel
from paged_backend.plugins.eviction import Lru, Slru
from paged_backend.plugins.fifo import Fifo
from paged_backend.plugins.priority import Priority
from paged_backend.policy.plugin_manager import BUILT_IN, TRACE_VARIABLE, PluginManager


def plugin(**hooks):
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def offering(name: str, value=Fifo, hook: str = "register_schedulers"):
    return plugin(**{hook: lambda register: register(name, value)})


@pytest.fixture
def manager():
    return PluginManager(load_entry_points=False)


# Choosing


def test_a_name_a_path_a_class_a_factory_and_an_instance_all_name_a_policy(manager):
    mine = Priority()
    for value in ("priority", "paged_backend.plugins.priority:Priority", Priority, lambda: Priority()):
        assert type(manager.scheduler(value, {})) is Priority
    assert manager.scheduler(mine, {}) is mine
    assert manager.scheduler("priority", {"preempt": True}).preempt
    assert manager.block_size_rule(32) == 32
    assert manager.block_size_rule("auto").__name__ == "auto"


def test_every_kv_group_gets_an_eviction_policy_of_its_own(manager):
    make = manager.eviction_factory("slru", {"protected": 0.5})
    assert make() is not make()
    assert isinstance(make(), Slru)
    with pytest.raises(ConfigError, match="pass the class"):
        manager.eviction_factory(Lru(), {})


def test_unknown_name_lists_the_known_ones(manager):
    with pytest.raises(UnknownPolicy, match="unknown scheduler 'deadlien'; choose one of deadline, fair, fifo"):
        manager.scheduler("deadlien", {})
    with pytest.raises(UnknownPolicy, match="lru"):
        manager.eviction_factory("lur", {})()
    with pytest.raises(ConfigError, match=r"eviction=5 is no EvictionPolicy; choose one of arc, .* or give a class or"):
        manager.eviction_factory(5, {})
    with pytest.raises(
        UnknownPolicy, match="'16'; choose one of auto, which name rules, or give an int from 1 to 4096"
    ):
        manager.block_size_rule("16")


@pytest.mark.parametrize(
    ("value", "options", "match"),
    [
        ("nowhere:Policy", {}, "cannot be imported"),
        ("paged_backend.plugins.fifo:Lifo", {}, "Lifo"),
        ("fifo", {"speed": 3}, "speed"),
        ("deadline", {"share": 7}, "share"),
        (lambda: object(), {}, "no SchedulingPolicy"),
        (
            5,
            {},
            "scheduler=5 is no SchedulingPolicy; choose one of deadline, .*window, or give a class, an instance or",
        ),
        (None, {}, "scheduler=None is no SchedulingPolicy; choose one of deadline"),
        (Fifo(), {"victim": "newest"}, "cannot be given with an instance"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_with_the_reason(manager, value, options, match):
    with pytest.raises(ConfigError, match=match):
        manager.scheduler(value, options)


def test_an_object_that_serves_another_engine_is_refused(manager):
    from paged_backend.request.request import Request

    busy = Fifo()
    busy.add(Request("0", [1], SamplingParams(), 0.0, 0).view, 0.0)
    with pytest.raises(ConfigError, match="serves one engine"):
        manager.scheduler(busy, {})


@pytest.mark.parametrize("value", [0, -3, 10**6, "huge", object()])
def test_block_size_that_is_none_is_refused(manager, value):
    with pytest.raises(ConfigError):
        manager.block_size_rule(value)


# Registering


def test_plugins_offer_policies_by_name_and_load_them_late():
    manager = PluginManager([offering("mine"), offering("late", "paged_backend.plugins.priority:Priority")])
    assert type(manager.scheduler("mine", {})) is Fifo
    assert type(manager.scheduler("late", {})) is Priority


def test_one_name_from_two_plugins_names_both():
    first, second = ModuleType("first_plugin"), ModuleType("second_plugin")
    for module in (first, second):
        module.register_evictions = hookimpl(lambda register: register("mine", Lru))
    with pytest.raises(PluginError, match="eviction 'mine' is registered by both") as caught:
        PluginManager([first, second])
    assert "first_plugin" in str(caught.value)
    assert "second_plugin" in str(caught.value)


def test_a_built_in_name_cannot_be_taken():
    with pytest.raises(PluginError, match=r"plugins\.schedulers"):
        PluginManager([offering("fifo")])


@pytest.mark.parametrize("name", ["", "a:b", None, 5])
def test_a_name_is_a_string_without_a_colon(name):
    with pytest.raises(PluginError, match="without a colon"):
        PluginManager([offering(name)])


def test_misspelt_hook_names_the_plugin_and_the_known_hooks():
    module = ModuleType("clumsy")
    module.step_finnished = hookimpl(lambda stats: None)
    with pytest.raises(PluginError, match=r"clumsy.*step_finnished") as caught:
        PluginManager([module])
    _, known = str(caught.value).split("the hooks are ")
    assert "step_finished" in known
    assert "step_finnished" not in known


class Misspelt:
    """Listens to what does not exist."""

    @hookimpl
    def nosuch(self, x):
        """Never."""


def test_an_object_with_a_misspelt_hook_is_named_once_by_its_class():
    with pytest.raises(PluginError) as caught:
        PluginManager([Misspelt()], load_entry_points=False)
    message = str(caught.value)
    assert message.startswith(f"plugin {__name__}.Misspelt: nosuch is no hook; the hooks are admit_request, engine_")
    assert message.count("Misspelt") == message.count("nosuch") == 1


@pytest.mark.parametrize(
    ("hook", "allowed"),
    [("step_finished", "engine, stats"), ("admit_request", "request, stats"), ("register_evictions", "re")],
)
def test_misspelt_argument_names_the_plugin_the_hook_and_the_arguments_there_are(hook, allowed):
    clumsy = plugin(**{hook: lambda statistics: None})
    expected = f"plugin types.SimpleNamespace: {hook} has no argument 'statistics'; choose from {allowed}"
    with pytest.raises(PluginError, match=f"^{expected}") as caught:
        PluginManager([clumsy])
    assert str(id(clumsy)) not in str(caught.value)


def test_an_argument_with_a_default_may_be_any():
    PluginManager([plugin(step_finished=lambda stats, every=3: None)], load_entry_points=False)


def test_an_option_that_a_policy_does_not_take_lists_those_it_takes(manager):
    with pytest.raises(ConfigError, match="Fair has no option 'wieghts'; choose from weights, prompt_cost, output_cos"):
        manager.scheduler("fair", {"wieghts": {}})
    with pytest.raises(ConfigError, match="Fifo has no option 'protected'; choose from none"):
        manager.eviction_factory("fifo", {"protected": 0.5})()
    with pytest.raises(ConfigError, match="is no EvictionPolicy; choose one of"):
        manager.eviction_factory(5, {})()


def test_registering_twice_is_an_error():
    once = offering("mine")
    with pytest.raises(PluginError, match=r"SimpleNamespace cannot be registered twice; it is there, passed by hand$"):
        PluginManager([once, once])


def test_a_class_is_not_an_object():
    class Observer:
        """Listens."""

        @hookimpl
        def step_finished(self, stats):
            """One more."""

    with pytest.raises(PluginError, match="pass an object"):
        PluginManager([Observer])


def test_hooks_cannot_be_wrapped():
    def wrapper():
        yield

    with pytest.raises(PluginError, match="cannot be wrapped"):
        PluginManager([SimpleNamespace(step_finished=hookimpl(wrapper=True)(wrapper))])


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_a_plugin_that_fails_to_register_is_named(error):
    def register_schedulers(register):
        raise error

    module = ModuleType("failing")
    module.register_schedulers = hookimpl(register_schedulers)
    with pytest.raises(PluginError, match="failing failed in register_schedulers"):
        PluginManager([module])


@pytest.mark.parametrize("version", [0, HOOK_API_VERSION + 1, "2", True])
def test_a_hook_version_that_is_not_known_is_refused_in_words(version):
    other = offering("mine")
    other.HOOK_API_VERSION = version
    words = f"hook version {version!r}; this paged_backend has version {HOOK_API_VERSION} and serves plugins from"
    with pytest.raises(PluginError, match=words):
        PluginManager([other])


@pytest.mark.parametrize("version", range(1, HOOK_API_VERSION + 1))
def test_what_was_written_for_an_earlier_version_runs_as_it_is(version):
    known = offering("mine")
    known.HOOK_API_VERSION = version
    assert "mine" in PluginManager([known]).names("scheduler")


# Describing


def test_plugins_are_described_with_where_they_come_from():
    infos = {info.name: info for info in PluginManager([offering("mine")], load_entry_points=False).describe()}
    schedulers = infos["paged_backend.plugins.schedulers"]
    assert schedulers.source == f"paged-backend {importlib.metadata.version('paged-backend')}"
    assert schedulers.location.endswith("schedulers.py")
    assert schedulers.hooks == ("register_schedulers",)
    assert "fair" in schedulers.names["scheduler"]
    mine = infos["types.SimpleNamespace"]
    assert mine.source == "passed by hand"
    assert mine.names["scheduler"] == ("mine",)
    assert set(BUILT_IN) < set(infos)


# Calling


def test_every_listener_hears_although_one_raises(manager):
    heard, errors = [], []

    def fail(stats):
        raise ValueError("broken")

    plugins = [plugin(step_finished=fail), plugin(step_finished=lambda stats: heard.append(stats))]
    manager = PluginManager(plugins, load_entry_points=False)
    manager.notify("step_finished", lambda *args: errors.append(args), engine=None, stats=5)
    assert heard == [5]
    assert [(name, str(error)) for name, _, error in errors] == [("types.SimpleNamespace", "broken")]
    assert manager.listens("step_finished")
    assert not manager.listens("request_added")


def test_hook_calls_can_be_traced(monkeypatch, capsys):
    monkeypatch.setenv(TRACE_VARIABLE, "1")
    manager = PluginManager([plugin(step_finished=lambda stats: None)], load_entry_points=False)
    manager.notify("step_finished", print, engine=None, stats=5)
    traced = capsys.readouterr().err
    assert "paged_backend.plugins.schedulers: register_schedulers" in traced
    assert "step_finished(engine=None, stats=5)" in traced


@pytest.fixture(scope="module")
def model():
    from tiny_models import make_tiny

    return make_tiny("llama", num_hidden_layers=1)


@pytest.mark.parametrize(
    ("answer", "reason"), [(False, "of plugin mine refused"), ("no more than 3 tokens", "no more than 3")]
)
def test_admission_hook_refuses_with_its_reason(model, answer, reason):
    mine = plugin(admit_request=lambda request: answer if request.num_prompt_tokens > 3 else None)
    mine.__name__ = "mine"
    engine = Engine(model, plugins=[mine])
    engine.add_request([5, 6, 7])
    with pytest.raises(RequestRefused, match=reason):
        engine.add_request([5, 6, 7, 8])
    assert engine.stats().num_waiting == 1


def test_the_first_opinion_on_admission_counts(model):
    # As everywhere in pluggy, the plugin given last is asked first.
    plugins = [plugin(admit_request=lambda request: "never heard"), plugin(admit_request=lambda stats: True)]
    engine = Engine(model, plugins=plugins)
    engine.add_request([5, 6, 7])


def test_notifications_tell_the_life_of_a_request(model):
    told = []
    listener = plugin(
        engine_started=lambda engine: told.append("started"),
        request_added=lambda request: told.append(("added", request.request_id)),
        request_finished=lambda request, output: told.append(("finished", output.finish_reason, len(output.token_ids))),
        step_finished=lambda stats: told.append(("step", stats.num_new_tokens)),
        engine_stopped=lambda engine: told.append("stopped"),
    )
    with Engine(model, plugins=[listener]) as engine:
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True), request_id="r")
        while engine.has_unfinished_requests():
            engine.step()
    assert told == ["started", ("added", "r"), ("step", 1), ("finished", "length", 2), ("step", 1), "stopped"]


def test_preemption_is_told(model):
    told = []
    listener = plugin(request_preempted=lambda request, num_blocks: told.append((request.order, num_blocks)))
    engine = Engine(model, plugins=[listener], block_size=4, kv_cache_memory=10 * 4 * 256)
    engine.generate([[5] * 8, [6] * 8], SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(told) == engine.stats().num_preemptions > 0
    assert all(order == 1 and num_blocks > 0 for order, num_blocks in told)


def attention_of(name, **functions):
    return offering(name, functions, hook="register_attention_backends")


def counted(calls):
    def decode_attention(query, cache, sequences, variant):
        calls.append(query.shape[0])
        return kernels.decode_attention(query, cache, sequences, variant, backend="reference")

    return decode_attention


def test_a_plugin_can_bring_its_own_attention(model):
    calls = []
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    expected = Engine(model).generate([[5, 6, 7]], params)[0].token_ids
    engine = Engine(model, plugins=[attention_of("mine", decode_attention=counted(calls))], attention_backend="mine")
    calls.clear()
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected
    assert len(calls) == 4


def test_two_engines_keep_their_own_backends_of_one_name(model):
    calls = [], []
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engines = [
        Engine(model, plugins=[attention_of("mine", decode_attention=counted(own))], attention_backend="mine")
        for own in calls
    ]
    for engine, own in zip(engines, calls, strict=True):
        for seen in calls:
            seen.clear()
        engine.generate([[5, 6, 7]], params)
        assert [len(seen) for seen in calls] == [4 if seen is own else 0 for seen in calls]
    with pytest.raises(UnknownPolicy, match="unknown attention_backend 'mine'"):
        Engine(model, attention_backend="mine")


def test_wrong_attention_of_a_plugin_is_refused_by_the_proof_which_names_it(model):
    def decode_attention(query, cache, sequences, variant):
        return query.new_zeros(*query.shape[:2], cache.value_dim)

    wrong = attention_of("wrong", decode_attention=decode_attention)
    with pytest.raises(UnsupportedModel, match="attention_backend='wrong'"):
        Engine(model, plugins=[wrong], attention_backend="wrong")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda query, cache: query,
            r"takes \(query, cache\), and is called with \(query, cache, seq",
        ),
        (lambda *_: 1 / 0, "failed with ZeroDivisionError: division by zero"),
        (lambda *_: 5, r"must return torch.float32 \(\d+, 4, 16\), got 5"),
        (lambda query, *_: query.double(), "must return torch.float32 .* got torch.float64"),
        (5, "is no function"),
    ],
)
def test_attention_that_breaks_its_contract_is_named_and_not_the_model(model, function, reason):
    broken = attention_of("broken", prefill_attention=function)
    with pytest.raises(PluginError, match=f"prefill_attention of attention backend 'broken'.*{reason}"):
        Engine(model, plugins=[broken], attention_backend="broken")


@pytest.mark.parametrize("value", [5, {"matmul": print}])
def test_attention_that_is_no_table_of_operations_is_refused(model, value):
    odd = offering("odd", value, hook="register_attention_backends")
    with pytest.raises(PluginError, match="store_kv"):
        Engine(model, plugins=[odd], attention_backend="odd")


def test_the_names_of_our_own_kernels_cannot_be_taken(model):
    thief = attention_of("reference", decode_attention=print)
    with pytest.raises(PluginError, match="built in"):
        Engine(model, plugins=[thief], attention_backend="reference")


def test_unknown_attention_backend_lists_the_known_ones(model):
    with pytest.raises(UnknownPolicy, match="auto, triton, cpu, reference"):
        Engine(model, attention_backend="flash")


def test_a_plugin_offers_a_router_by_name():
    from paged_backend.plugins.routers import RoundRobin

    module = ModuleType("routing_plugin")
    module.register_routers = hookimpl(lambda register: register("mine", RoundRobin))
    manager = PluginManager([module])
    assert type(manager.router("mine", {})) is RoundRobin
    with pytest.raises(ConfigError, match="factor must be a number from 1 to inf, got 0"):
        manager.router("prefix_affinity", {"factor": 0})
    with pytest.raises(ConfigError, match="router=5 is no RoutingPolicy; choose one of least_loaded, mine"):
        manager.router(5, {})
