"""PluginManager: finds plugins, and turns a name, import path, class or instance into a policy."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from paged_backend import hookspecs
from paged_backend.config import check_block_size
from paged_backend.errors import ConfigError, PluginError, UnknownPolicy
from paged_backend.policies import BlockSizeRule, EvictionPolicy, SchedulingPolicy

BUILT_IN = ("paged_backend.plugins.schedulers", "paged_backend.plugins.eviction")
PLUGINS_VARIABLE = "PAGED_BACKEND_PLUGINS"
TRACE_VARIABLE = "PAGED_BACKEND_TRACE_HOOKS"
KINDS = ("scheduler", "eviction", "block_size", "attention_backend")
ErrorHandler = Callable[[object, str, BaseException | str], None]
NOTIFICATIONS = (
    "engine_started",
    "request_added",
    "request_preempted",
    "request_finished",
    "step_finished",
    "engine_stopped",
)


class PluginManager:
    """The plugins of one engine: built-in modules, installed entry points, and those passed by hand, in that order.

    ``PAGED_BACKEND_PLUGINS`` limits entry points to a comma-separated list of names (empty: none).
    Raises PluginError when a plugin cannot be loaded, implements an unknown hook, asks for another hook version, or
    registers a name that is taken.
    """

    def __init__(self, plugins: Sequence[Any] = (), *, load_entry_points: bool = True) -> None:
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        for module in BUILT_IN:
            self._register(importlib.import_module(module), module)
        if load_entry_points:
            self._load_entry_points()
        for plugin in plugins:
            self._register(plugin, getattr(plugin, "__name__", None))
        try:
            self._pm.check_pending()
        except pluggy.PluginValidationError as error:
            known = ", ".join(sorted(name for name in vars(self._pm.hook) if not name.startswith("_")))
            raise PluginError(f"{error}; the hooks are {known}") from error
        self._registry = {kind: self._collect(kind) for kind in KINDS}
        self._impls = {name: self._impls_of(name) for name in (*NOTIFICATIONS, "admit_request")}
        self._trace = bool(os.environ.get(TRACE_VARIABLE))

    def _load_entry_points(self) -> None:
        limit = os.environ.get(PLUGINS_VARIABLE)
        allowed = None if limit is None else {name.strip() for name in limit.split(",") if name.strip()}
        for point in importlib.metadata.entry_points(group=hookspecs.PROJECT):
            if allowed is not None and point.name not in allowed:
                continue
            try:
                plugin = point.load()
            except Exception as error:
                raise PluginError(
                    f"plugin {point.name!r} ({point.value}) cannot be loaded: {error!r}; fix or uninstall it, or leave "
                    f"it out of {PLUGINS_VARIABLE}"
                ) from error
            self._register(plugin, point.name)

    def _register(self, plugin: Any, name: str | None) -> None:
        version = getattr(plugin, "HOOK_API_VERSION", hookspecs.HOOK_API_VERSION)
        label = name or repr(plugin)
        if version != hookspecs.HOOK_API_VERSION:
            raise PluginError(
                f"plugin {label} was written for hook version {version!r}; this paged_backend has version "
                f"{hookspecs.HOOK_API_VERSION}"
            )
        try:
            self._pm.register(plugin, name)
        except (ValueError, pluggy.PluginValidationError) as error:
            raise PluginError(f"plugin {label} cannot be registered: {error}") from error

    def _impls_of(self, name: str) -> list[Any]:
        """The hook's implementations in calling order; each is called by itself, so that one cannot stop another."""
        impls = getattr(self._pm.hook, name).get_hookimpls()
        for impl in impls:
            if impl.hookwrapper or impl.wrapper:
                raise PluginError(f"plugin {impl.plugin_name} wraps {name}; this hook cannot be wrapped")
        return list(reversed(impls))

    def listens(self, name: str) -> bool:
        """Whether any plugin implements the hook."""
        return bool(self._impls[name])

    def notify(self, name: str, on_error: ErrorHandler, **kwargs: Any) -> None:
        """Tell every plugin that listens; one that raises is reported and the others still hear."""
        for impl in self._impls[name]:
            self._call(impl, name, on_error, kwargs)

    def first_opinion(self, name: str, on_error: ErrorHandler, **kwargs: Any) -> Any:
        """The first answer that is not None, or None."""
        for impl in self._impls[name]:
            answer = self._call(impl, name, on_error, kwargs)
            if answer is not None:
                return answer
        return None

    def _call(self, impl: Any, name: str, on_error: ErrorHandler, kwargs: Mapping[str, Any]) -> Any:
        if self._trace:
            arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            print(f"{hookspecs.PROJECT}: {impl.plugin_name}: {name}({arguments})", file=sys.stderr, flush=True)
        try:
            return impl.function(*(kwargs[argument] for argument in impl.argnames))
        except Exception as error:
            on_error(impl.plugin_name, name, error)
            return None

    def _collect(self, kind: str) -> dict[str, tuple[Any, str]]:
        """Registered names of one kind, each with what it stands for and the plugin it came from."""
        found: dict[str, tuple[Any, str]] = {}
        for impl in getattr(self._pm.hook, f"register_{kind}s").get_hookimpls():

            def register(name: str, value: Any, source: str = impl.plugin_name) -> None:
                if not isinstance(name, str) or not name or ":" in name:
                    raise PluginError(f"plugin {source} registers {kind} {name!r}; a name is a string without a colon")
                if name in found:
                    raise PluginError(f"{kind} {name!r} is registered by both {found[name][1]} and {source}")
                found[name] = (value, source)

            try:
                impl.function(register)
            except PluginError:
                raise
            except Exception as error:
                raise PluginError(f"plugin {impl.plugin_name} failed in register_{kind}s: {error!r}") from error
        return found

    def names(self, kind: str) -> dict[str, str]:
        """Registered names of ``kind`` ("scheduler", "eviction", ...), each with the plugin it came from."""
        return {name: source for name, (_, source) in sorted(self._registry[kind].items())}

    @property
    def plugins(self) -> list[str]:
        return [name for name, _ in self._pm.list_name_plugin()]

    def scheduler(self, value: Any, options: Mapping[str, Any]) -> SchedulingPolicy:
        """The scheduling policy that ``value`` names, or is."""
        return self._policy("scheduler", value, options, SchedulingPolicy)

    def eviction_factory(self, value: Any, options: Mapping[str, Any]) -> Callable[[], EvictionPolicy]:
        """A function that makes one eviction policy per KV group."""
        if isinstance(value, EvictionPolicy):
            raise ConfigError(
                f"eviction={value!r} is an instance, but each KV group keeps an order of its own; "
                "pass the class, its registered name, or 'module:attribute'"
            )
        return lambda: self._policy("eviction", value, options, EvictionPolicy)

    def block_size_rule(self, value: Any) -> int | BlockSizeRule:
        """A number, or the rule that ``value`` names or is."""
        if isinstance(value, int):
            return check_block_size(value)
        return self._lookup("block_size", value) if isinstance(value, str) else value

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
            raise ConfigError(f"{kind}={value!r} is neither a name, a class nor a {base.__name__}")
        try:
            policy = value(**options)
        except TypeError as error:
            raise ConfigError(
                f"{kind} {_name(value)} does not take {kind}_options={dict(options)!r}: {error}"
            ) from error
        if not isinstance(policy, base):
            raise ConfigError(f"{kind} {_name(value)} made {policy!r}, which is no {base.__name__}")
        return policy

    def _lookup(self, kind: str, name: str) -> Any:
        if ":" in name:
            return _import(kind, name)
        if name not in self._registry[kind]:
            known = ", ".join(sorted(self._registry[kind])) or "none"
            raise UnknownPolicy(f"unknown {kind} {name!r}; choose one of {known}, or give 'module:attribute'")
        value = self._registry[kind][name][0]
        return _import(kind, value) if isinstance(value, str) else value


def _import(kind: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownPolicy(f"{kind} {path!r} cannot be imported: {error}") from error
    return value


def _name(value: Any) -> str:
    return value.__name__ if inspect.isclass(value) or inspect.isfunction(value) else repr(value)
