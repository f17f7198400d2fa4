"""What is no value for an option of a policy is refused where the policy is made, by name."""

from __future__ import annotations

import math

import pytest

from paged_backend.errors import ConfigError
from paged_backend.plugins.length_prediction import RunningQuantile
from paged_backend.plugins.observers import Prometheus, StepLog
from paged_backend.plugins.service_time import StepCost
from paged_backend.policy.plugin_manager import PluginManager

NO_NUMBER = ["x", None, True, [1], math.nan]
REFUSED = [
    *(("starvation_aware", "max_overtakes", value, "an int of at least 0") for value in ["x", True, -1, 1.5]),
    *(("starvation_aware", "max_wait_s", value, "a number from 0 to inf") for value in ["x", True, math.nan, -1.0]),
    *(("starvation_aware", "stretch", value, "a number from 1 to inf") for value in [*NO_NUMBER, 0.5]),
    *(("starvation_aware", "slack", value, "a number from 0 to inf") for value in [*NO_NUMBER, -1.0]),
    *(("starvation_aware", "prompt_cost", value, "a finite number of at least 0") for value in ["x", True, -1]),
    *(("deadline", "share", value, "a number from 0 to 1") for value in [*NO_NUMBER, -0.1, 1.5, 10**400]),
    *(("deadline", "shed", value, "True or False") for value in ["no", 0, None]),
    *(("deadline", "preempt", value, "True or False") for value in ["no", 1, None]),
    *(("deadline", "cost", value, "a StepCost or None") for value in ["x", StepCost, 3]),
    *(("priority", "preempt", value, "True or False") for value in ["no", 1, None]),
    *(("priority", "aging_s", value, "a finite number above 0") for value in ["x", True, 0, -1, math.inf, 10**400]),
    *(("fair", "prompt_cost", value, "a finite number of at least 0") for value in [*NO_NUMBER, -1, math.inf]),
    *(("fair", "output_cost", value, "a finite number of at least 0") for value in [*NO_NUMBER, -0.5, math.inf]),
    *(("fair", "weights", value, "map client ids to numbers above 0") for value in [5, "ab", ["a"], 0, False]),
    *(("static", "batch", value, "an int of at least 1") for value in ["x", None, True, 0, 1.5]),
    *(("window", "window_ms", value, "a number from 0 to 60000") for value in [*NO_NUMBER, -1, 1e9]),
]


@pytest.fixture(scope="module")
def manager():
    return PluginManager(load_entry_points=False)


@pytest.mark.parametrize(("policy", "option", "value", "allowed"), REFUSED)
def test_a_wrong_value_is_told_with_the_option_and_what_is_allowed(manager, policy, option, value, allowed):
    with pytest.raises(ConfigError) as caught:
        manager.scheduler(policy, {option: value})
    message = str(caught.value)
    assert message.startswith(f"{option} must ")
    assert allowed in message
    assert f"got {value!r:.200}" in message


@pytest.mark.parametrize("policy", ["fifo", "starvation_aware", "deadline", "priority", "fair", "static", "window"])
@pytest.mark.parametrize("victim", [5, None, "oldest", object])
def test_every_policy_refuses_what_is_no_victim_rule(manager, policy, victim):
    with pytest.raises(ConfigError, match=r"victim=.* is unknown; choose from newest, least_computed"):
        manager.scheduler(policy, {"victim": victim})


@pytest.mark.parametrize("policy", ["starvation_aware", "deadline"])
@pytest.mark.parametrize("predict", [5, None, "magic", RunningQuantile])
def test_every_policy_refuses_what_is_no_predictor(manager, policy, predict):
    with pytest.raises(ConfigError, match=r"predict=.* is unknown; choose from max_tokens, quantile"):
        manager.scheduler(policy, {"predict": predict})


@pytest.mark.parametrize("value", [*NO_NUMBER, -0.1, 1.1])
def test_the_protected_share_must_be_a_number_from_0_to_1(manager, value):
    with pytest.raises(ConfigError, match=r"^protected must be a number from 0 to 1, got "):
        manager.eviction_factory("slru", {"protected": value})()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 0}, r"^weights\['a'\] must be a finite number above 0, got 0$"),
        ({"a": 1, "b": "much"}, r"^weights\['b'\] must be a finite number above 0, got 'much'$"),
        ({None: math.inf}, r"^weights\[None\] must be a finite number above 0, got inf$"),
        ({5: 1}, r"^a client id of weights must be a text or None, got 5$"),
    ],
)
def test_a_wrong_weight_is_told_with_its_client(manager, weights, message):
    with pytest.raises(ConfigError, match=message):
        manager.scheduler("fair", {"weights": weights})


@pytest.mark.parametrize(("option", "value"), [("quantile", "x"), ("quantile", 2), ("window", 0), ("window", "x")])
def test_a_quantile_that_makes_no_sense_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"^{option} must be .*, got {value!r}$"):
        RunningQuantile(**{option: value})


@pytest.mark.parametrize(
    ("observer", "option", "value"),
    [
        (StepLog, "every", 0),
        (StepLog, "every", "x"),
        (StepLog, "console", "x"),
        (Prometheus, "interval_s", -1),
        (Prometheus, "interval_s", "x"),
        (Prometheus, "registry", "x"),
    ],
)
def test_an_observer_names_the_option_that_it_cannot_use(observer, option, value):
    with pytest.raises(ConfigError, match=f"^{option} must be .*, got {value!r}$"):
        observer(**{option: value})


def test_values_at_the_ends_of_their_ranges_are_taken(manager):
    assert manager.scheduler("starvation_aware", {"max_overtakes": 0, "max_wait_s": math.inf}).max_wait_s == math.inf
    assert manager.scheduler("deadline", {"share": 1, "cost": StepCost()}).share == 1
    assert manager.scheduler("priority", {"aging_s": None}).aging_s is None
    assert manager.scheduler("fair", {"weights": {None: 2}, "prompt_cost": 0}).prompt_cost == 0
    assert manager.scheduler("window", {"batch": 1, "window_ms": 0}).window_s == 0
