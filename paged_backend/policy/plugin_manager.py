"""PluginManager: finds plugins, and turns a name, import path, class or instance into a policy."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from paged_backend import hookspecs
from paged_backend.checks import describe
from paged_backend.config import MAX_BLOCK_SIZE, check_block_size
from paged_backend.errors import ConfigError, PluginError, UnknownPolicy
from paged_backend.policies import BlockSizeRule, EvictionPolicy, RoutingPolicy, SchedulingPolicy
from paged_backend.policy.entry_points import PLUGINS_VARIABLE, clash_of, distribution_of, entry_points, loaded
from paged_backend.policy.policy_errors import FAILED, ErrorHandler, call, name_of

logger = logging.getLogger("paged_backend")

BUILT_IN = (
    "paged_backend.plugins.schedulers",
    "paged_backend.plugins.eviction",
    "paged_backend.plugins.block_sizes",
    "paged_backend.plugins.routers",
)
TRACE_VARIABLE = "PAGED_BACKEND_TRACE_HOOKS"
KINDS = ("scheduler", "eviction", "block_size", "attention_backend", "router")
# What an option may be besides a registered name.
_OTHERWISE = {
    "scheduler": "or give a class, an instance or 'module:attribute'",
    "eviction": "or give a class or 'module:attribute'",
    "block_size": f"which name rules, or give an int from 1 to {MAX_BLOCK_SIZE}, a rule (shape, device) -> int itself "
    "or its 'module:attribute'",
    "attention_backend": "or give 'module:attribute'",
    "router": "or give a class, an instance or 'module:attribute'",
}
NOTIFICATIONS = (
    "engine_started",
    "request_added",
    "request_preempted",
    "request_finished",
    "step_finished",
    "engine_stopped",
)
# What pluggy marks a hook's declaration with.
_SPEC = f"{hookspecs.PROJECT}_spec"
# What a plugin offers: its kind, its name, what the name stands for, and the plugin.
Offer = tuple[str, str, Any, str]


@dataclass(frozen=True)
class PluginInfo:
    """What a plugin is.

    source: the distribution and version it was installed with, "paged-backend" for built-in ones, or "passed by hand".
    location: the file it lives in, if it is known. hooks: those it implements. names: per kind, what it registers.
    error: why an installed plugin, or a name that it registers, was left out; None where all is well.
    """

    name: str
    source: str
    location: str | None
    hooks: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    error: str | None = None


class PluginManager:
    """The plugins of one engine: built-in modules, installed entry points, and those passed by hand, in that order.

    ``PAGED_BACKEND_PLUGINS`` limits entry points to a comma-separated list of names (empty: none);
    ``PAGED_BACKEND_TRACE_HOOKS=1`` prints every hook call to stderr.

    A plugin is broken that cannot be loaded, implements no hook or an unknown one, asks for another hook version, or
    fails to register what it offers. Passed by hand or named in ``PAGED_BACKEND_PLUGINS`` it raises PluginError; one
    that merely is installed is named in a warning and left out. Two plugins of one name, and two that offer one name,
    raise PluginError.

    lists: whatever is wrong with an installed plugin is told by ``describe`` alone, and raises nothing.
    """

    def __init__(self, plugins: Sequence[Any] = (), *, load_entry_points: bool = True, lists: bool = False) -> None:
        if not isinstance(plugins, Iterable) or isinstance(plugins, (str, bytes, Mapping)):
            raise ConfigError(
                f"plugins must be a sequence of modules or objects with hooks, got {describe(plugins)}; one goes as "
                "[plugin]"
            )
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._trace = bool(os.environ.get(TRACE_VARIABLE))
        self._sources: dict[str, str] = {}
        self._broken: list[PluginInfo] = []
        self._lists = lists
        # Per kind, the registered names, each with what it stands for and the plugin it came from.
        self._registry: dict[str, dict[str, tuple[Any, str]]] = {kind: {} for kind in KINDS}
        version = importlib.metadata.version("paged-backend")
        for module in BUILT_IN:
            self._enter(self._register(importlib.import_module(module), module, f"paged-backend {version}"))
        if load_entry_points:
            found = entry_points()
            for point, is_wanted in found:
                self._load(point, is_wanted, clash_of(point, [each for each, _ in found]))
        for plugin in plugins:
            self._enter(self._register(plugin, getattr(plugin, "__name__", None), "passed by hand"))
        self._impls = {name: self._impls_of(name) for name in (*NOTIFICATIONS, "admit_request")}

    def _load(self, point: importlib.metadata.EntryPoint, is_wanted: bool, clash: str | None) -> None:
        """Register an installed plugin; a broken one is left out with a warning, unless it ``is_wanted`` by name."""
        source = distribution_of(point)
        try:
            if clash is not None:
                raise PluginError(clash)
            offers = self._register(loaded(point), point.name, source)
        except PluginError as error:
            if not self._lists:
                if is_wanted or clash is not None:
                    raise
                logger.warning("%s; the engine goes on without this plugin, which comes from %s", error, source)
            self._leave_out(point.name, source, error)
            return
        for offer in offers:
            try:
                self._enter([offer])
            except PluginError as error:
                if not self._lists:
                    raise
                self._leave_out(point.name, source, error)

    def _leave_out(self, name: str, source: str, error: PluginError) -> None:
        self._broken.append(PluginInfo(name, source, None, (), {}, f"{error}"))

    def _register(self, plugin: Any, name: str | None, source: str) -> list[Offer]:
        """Take a plugin in and return what it offers; raises PluginError, and forgets it, if it is broken."""
        version = getattr(plugin, "HOOK_API_VERSION", hookspecs.HOOK_API_VERSION)
        label = name or name_of(plugin)
        known = range(hookspecs.OLDEST_HOOK_API_VERSION, hookspecs.HOOK_API_VERSION + 1)
        if type(version) is not int or version not in known:
            raise PluginError(
                f"plugin {label} was written for hook version {version!r}; this paged_backend has version "
                f"{known[-1]} and serves plugins from version {known[0]} on"
            )
        if isinstance(plugin, type):
            raise PluginError(f"plugin {label} is a class; pass an object of it, whose methods can be called")
        for other_name, other in self._pm.list_name_plugin():
            if other is plugin:
                raise PluginError(
                    f"plugin {label} cannot be registered twice; it is there, {self._sources[other_name]}"
                )
            if other_name == name:
                raise PluginError(
                    f"plugin {label}, {source}, cannot be registered: another plugin has that name, "
                    f"{self._sources[other_name]}"
                )
        try:
            self._check_arguments(plugin, label)
            self._sources[str(self._pm.register(plugin, name))] = source
            self._check_hooks(plugin, label)
            return [offer for kind in KINDS for offer in self._offers(plugin, kind)]
        except BaseException as error:
            if self._pm.is_registered(plugin):
                self._pm.unregister(plugin)
            if isinstance(error, (PluginError, KeyboardInterrupt)):
                raise
            raise PluginError(f"plugin {label} cannot be registered: {error!r}") from error

    def _enter(self, offers: Iterable[Offer]) -> None:
        """Make what a plugin offers known by name; raises PluginError for a name that another one has offered."""
        for kind, name, value, plugin in offers:
            if name in self._registry[kind]:
                raise PluginError(
                    f"{kind} {name!r} is registered by both {self._registry[kind][name][1]} and {plugin}; an "
                    f"installed plugin can be left out by {PLUGINS_VARIABLE}"
                )
            self._registry[kind][name] = (value, plugin)

    def _check_arguments(self, plugin: Any, label: str) -> None:
        """PluginError for an argument that a hook does not have; pluggy's own error calls a plugin by a number."""
        for attribute in dir(plugin):
            options = self._pm.parse_hookimpl_opts(plugin, attribute)
            caller = getattr(self._pm.hook, (options and options["specname"]) or attribute, None)
            if options is None or not isinstance(caller, pluggy.HookCaller) or caller.spec is None:
                continue
            parameters = inspect.signature(getattr(plugin, attribute)).parameters.values()
            needed = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            if unknown := [name for name in needed if name not in caller.spec.argnames]:
                raise PluginError(
                    f"plugin {label}: {caller.name} has no argument {unknown[0]!r}; choose from "
                    f"{', '.join(caller.spec.argnames)}"
                )

    def _check_hooks(self, plugin: Any, label: str) -> None:
        """PluginError for one without hooks, with what is no hook, or with hooks of a kind that is never called."""
        callers = self._pm.get_hookcallers(plugin)
        if not callers:
            raise PluginError(
                f"plugin {label} has no hooks; it must be a module or an object whose functions are marked with "
                "@paged_backend.hookimpl"
            )
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin and not caller.has_spec() and not impl.optionalhook:
                    known = ", ".join(
                        sorted(name for name in vars(hookspecs) if hasattr(getattr(hookspecs, name), _SPEC))
                    )
                    raise PluginError(f"plugin {label}: {caller.name} is no hook; the hooks are {known}")
                if impl.plugin is plugin and (impl.hookwrapper or impl.wrapper):
                    raise PluginError(f"plugin {label} wraps {caller.name}; this hook cannot be wrapped")

    def _impls_of(self, name: str) -> list[Any]:
        """The hook's implementations in calling order; each is called by itself, so that one cannot stop another."""
        return list(reversed(getattr(self._pm.hook, name).get_hookimpls()))

    def listens(self, name: str) -> bool:
        """Whether any plugin implements the hook."""
        return bool(self._impls[name])

    def notify(self, name: str, on_error: ErrorHandler, **kwargs: Any) -> None:
        """Tell every plugin that listens; one that raises is reported and the others still hear."""
        for impl in self._impls[name]:
            self._ask(impl, name, on_error, kwargs)

    def first_opinion(
        self, name: str, on_error: ErrorHandler, is_valid: Callable[[Any], bool], **kwargs: Any
    ) -> tuple[Any, str]:
        """The first answer that is not None, and whose; one that is not valid is reported and counts as None."""
        for impl in self._impls[name]:
            answer = self._ask(impl, name, on_error, kwargs)
            if answer is None or answer is FAILED:
                continue
            if is_valid(answer):
                return answer, _label(impl)
            on_error(_label(impl), name, f"returned {describe(answer)}, which is no answer to this hook")
        return None, ""

    def _ask(self, impl: Any, name: str, on_error: ErrorHandler, kwargs: Mapping[str, Any]) -> Any:
        self._print_call(impl, name, kwargs)
        return call(
            on_error,
            _label(impl),
            name,
            lambda: impl.function(*(kwargs[key] for key in impl.argnames)),
            # Nobody waits while an engine is made or closed.
            may_take_long=name in ("engine_started", "engine_stopped"),
        )

    def _print_call(self, impl: Any, name: str, kwargs: Mapping[str, Any]) -> None:
        if self._trace:
            arguments = ", ".join(f"{key}={describe(value)}" for key, value in kwargs.items())
            print(f"{hookspecs.PROJECT}: {_label(impl)}: {name}({arguments})", file=sys.stderr, flush=True)

    def _offers(self, plugin: Any, kind: str) -> list[Offer]:
        """What a plugin registers of one kind."""
        offers: list[Offer] = []
        hook = f"register_{kind}s"
        for impl in getattr(self._pm.hook, hook).get_hookimpls():
            if impl.plugin is not plugin:
                continue
            label = _label(impl)

            def register(name: str, value: Any, label: str = label) -> None:
                if not isinstance(name, str) or not name or ":" in name:
                    raise PluginError(f"plugin {label} registers {kind} {name!r}; a name is a string without a colon")
                if any(name == other for _, other, *_ in offers):
                    raise PluginError(f"plugin {label} registers {kind} {name!r} twice")
                offers.append((kind, name, value, label))

            self._print_call(impl, hook, {"register": register})
            try:
                impl.function(*[register][: len(impl.argnames)])
            except (PluginError, KeyboardInterrupt):
                raise
            except BaseException as error:
                raise PluginError(f"plugin {label} failed in {hook}: {error!r}") from error
        return offers

    def names(self, kind: str) -> dict[str, str]:
        """Registered names of ``kind`` ("scheduler", "eviction", ...), each with the plugin it came from."""
        return {name: source for name, (_, source) in sorted(self._registry[kind].items())}

    @property
    def plugins(self) -> list[str]:
        return [name for name, _ in self._pm.list_name_plugin()]

    def describe(self) -> list[PluginInfo]:
        """The loaded plugins in order of registration, then those that are broken, and where each comes from."""
        loaded = [
            PluginInfo(
                name=_readable(name, plugin),
                source=self._sources[name],
                location=getattr(sys.modules.get(getattr(plugin, "__module__", "") or name, plugin), "__file__", None),
                hooks=tuple(sorted(caller.name for caller in self._pm.get_hookcallers(plugin) or ())),
                names={
                    kind: tuple(n for n, source in self.names(kind).items() if source == _readable(name, plugin))
                    for kind in KINDS
                },
            )
            for name, plugin in self._pm.list_name_plugin()
        ]
        return loaded + self._broken

    def scheduler(self, value: Any, options: Mapping[str, Any]) -> SchedulingPolicy:
        """The scheduling policy that ``value`` names, or is."""
        policy = self._policy("scheduler", value, options, SchedulingPolicy)
        try:
            count = len(policy)
        except Exception:
            # An engine finds out, and can go on without it.
            count = 0
        if count:
            raise ConfigError(f"scheduler={policy!r} has {count} requests already; an object serves one engine")
        return policy

    def eviction_factory(self, value: Any, options: Mapping[str, Any]) -> Callable[[], EvictionPolicy]:
        """A function that makes one eviction policy per KV group. Raises ConfigError if it could make none."""
        if isinstance(value, EvictionPolicy):
            raise ConfigError(
                f"eviction={value!r} is an instance, but each KV group keeps an order of its own; "
                "pass the class, its registered name, or 'module:attribute'"
            )
        if isinstance(value, str):
            value = self._lookup("eviction", value)

        def make() -> EvictionPolicy:
            policy: EvictionPolicy = self._policy("eviction", value, options, EvictionPolicy)
            return policy

        # One that cannot be made is told now.
        make()
        return make

    def block_size_rule(self, value: Any) -> int | BlockSizeRule:
        """A number, or the rule that ``value`` names or is."""
        if isinstance(value, str):
            value = self._lookup("block_size", value)
        if isinstance(value, int):
            return check_block_size(value)
        if not callable(value):
            raise ConfigError(f"block_size={value!r} is neither a number, a name nor a rule (shape, device) -> int")
        rule: BlockSizeRule = value
        return rule

    def attention_backend(self, name: str) -> Any:
        """What plugins offer under this name, or it is the path of; None when it is the kernels' own."""
        return (
            self._lookup("attention_backend", name)
            if ":" in name or name in self._registry["attention_backend"]
            else None
        )

    def router(self, value: Any, options: Mapping[str, Any]) -> RoutingPolicy:
        """The routing policy that ``value`` names, or is."""
        policy: RoutingPolicy = self._policy("router", value, options, RoutingPolicy)
        return policy

    def takes_option(self, kind: str, name: str, option: str) -> bool:
        """Whether the policy of this name says that it takes the option. Raises UnknownPolicy."""
        return option in (_named_options(self._lookup(kind, name)) or ())

    def _policy(self, kind: str, value: Any, options: Mapping[str, Any], base: type) -> Any:
        if isinstance(value, str):
            value = self._lookup(kind, value)
        if isinstance(value, base):
            if options:
                raise ConfigError(
                    f"{kind}_options={dict(options)!r} cannot be given with an instance; configure it there"
                )
            return value
        if not callable(value):
            raise ConfigError(f"{kind}={describe(value)} is no {base.__name__}; {self._allowed(kind)}")
        _check_options(kind, value, options)
        try:
            policy = value(**options)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{kind} {name_of(value)} cannot be made with {kind}_options={dict(options)!r}: {error}"
            ) from error
        if not isinstance(policy, base):
            raise ConfigError(f"{kind} {name_of(value)} made {policy!r}, which is no {base.__name__}")
        return policy

    def _lookup(self, kind: str, name: str) -> Any:
        if ":" in name:
            return _import(kind, name)
        if name not in self._registry[kind]:
            raise UnknownPolicy(f"unknown {kind} {name!r}; {self._allowed(kind)}")
        value = self._registry[kind][name][0]
        return _import(kind, value) if isinstance(value, str) else value

    def _allowed(self, kind: str) -> str:
        """What may be given, for messages."""
        known = ", ".join(sorted(self._registry[kind])) or "none"
        broken = "".join(f"; an installed plugin was left out: {info.error}" for info in self._broken)
        return f"choose one of {known}, {_OTHERWISE[kind]}{broken}"


def _check_options(kind: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """ConfigError for an option that a class or factory does not take, as far as it says what it takes."""
    known = _named_options(factory)
    if known is not None and (unknown := [name for name in options if name not in known]):
        raise ConfigError(
            f"{kind} {name_of(factory)} has no option {unknown[0]!r}; choose from {', '.join(known) or 'none'}"
        )


def _named_options(factory: Any) -> list[str] | None:
    """The options that a class or factory names; None if it does not say, or takes any."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _label(impl: Any) -> str:
    return _readable(impl.plugin_name, impl.plugin)


def _readable(name: str, plugin: Any) -> str:
    """pluggy calls an object that was given no name by its number."""
    return name_of(plugin) if name == str(id(plugin)) else name


def _import(kind: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownPolicy(f"{kind} {path!r} cannot be imported: {error}") from error
    return value
