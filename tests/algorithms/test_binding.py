"""Arguments are found by the names in a signature: columns first, then settings, then defaults."""

import copy
import pickle

import pytest

from verl.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    bind_arguments,
    missing_settings,
    required_columns,
)
from verl.algorithms.binding import Settings, check_settings, optional_columns, reads_all_columns

COLUMNS = {"token_level_rewards": "r", "response_mask": "m", "uid": "u", "old_log_probs": "o"}
SETTINGS = {"gamma": 0.9, "lam": None, "norm_adv_by_std_in_grpo": False, "nested": {"k": 1}}


def ours(token_level_rewards, response_mask, uid, rollout_is_weights=None, *, gamma=1.0, lam=1.0, epsilon=1e-6):
    return locals()


def theirs(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs):
    return locals()


class Estimator:
    """An object with a call and a method."""

    def __call__(self, uid, *, gamma=1.0):
        pass

    def method(self, uid):
        pass


def numbers(x, *, my_temp=2.0, annotated: float, number=2, flag=True):
    pass


def needs(*, beta):
    pass


def hidden(uid, /):
    pass


USED = {"token_level_rewards": "r", "response_mask": "m", "uid": "u"}
GIVEN = {"my_temp": 3, "annotated": 4, "number": 3, "flag": False}


@pytest.mark.parametrize(
    ("function", "columns", "settings", "found"),
    [
        (ours, COLUMNS, SETTINGS, USED | {"gamma": 0.9}),  # lam is null: the published default stays
        (ours, COLUMNS | {"rollout_is_weights": "w"}, {}, USED | {"rollout_is_weights": "w"}),
        (ours, COLUMNS | {"rollout_is_weights": None}, {}, USED),
        (ours, COLUMNS | {"gamma": "column"}, SETTINGS, USED | {"gamma": "column"}),
        # `algorithm.adv_kwargs.my_temp=3` times an integer mask is a tensor of floats, as with the default 2.0
        (numbers, {"x": 0}, GIVEN, {"x": 0, "my_temp": 3.0, "annotated": 4.0, "number": 3, "flag": False}),
        (Estimator(), COLUMNS, SETTINGS, {"uid": "u", "gamma": 0.9}),
        (Estimator().method, COLUMNS, SETTINGS, {"uid": "u"}),
    ],
)
def test_arguments_are_columns_then_settings_then_defaults(function, columns, settings, found):
    bound = bind_arguments(function, columns, settings)
    assert bound == found and [*map(type, bound.values())] == [type(found[name]) for name in bound]


@pytest.mark.parametrize(
    ("function", "columns", "settings", "message"),
    [
        (ours, COLUMNS | {"uid": None}, {}, "requires 'uid', but there is no column or setting"),
        (ours, {"response_mask": "m"}, SETTINGS,
         "ours requires 'token_level_rewards', but there is no column or setting of that name.*"
         "columns: response_mask; settings: gamma, lam, nested, norm_adv_by_std_in_grpo"),
        (Estimator(), {}, SETTINGS, "Estimator requires 'uid'"),
        (needs, {}, {}, "'beta', but there is no setting of that name"),
        (needs, {}, {"beta": None}, "'beta', but the setting is null"),
        (hidden, COLUMNS, {}, r"positional-only parameters .'uid'.: .* remove the '/'"),
    ],
)  # fmt: skip
def test_arguments_that_are_missing_are_named(function, columns, settings, message):
    with pytest.raises(ValueError, match=message):
        bind_arguments(function, columns, settings)


def test_functions_written_for_index_and_config():
    bound = theirs(**bind_arguments(theirs, COLUMNS, SETTINGS))
    assert bound["index"] == "u"
    assert bound["epsilon"] == 1e-6
    assert bound["kwargs"] == {}
    config = bound["config"]
    assert config.gamma == config["gamma"] == config.get("gamma") == 0.9
    assert config.get("absent", 5) == 5
    assert "gamma" in config and "absent" not in config
    assert config.nested.k == config["nested"]["k"] == 1
    assert dict(**config.global_batch_info) == {}  # the counts travel in loss_agg_mode


def test_positional_settings_of_functions_written_elsewhere():
    def gae(token_level_rewards, values, response_mask, gamma, lam):
        pass

    assert required_columns(gae, {"gamma", "lam"}) == ("token_level_rewards", "values", "response_mask")


def test_required_columns():
    assert required_columns(ours, SETTINGS) == ("token_level_rewards", "response_mask", "uid")
    assert required_columns(theirs, SETTINGS) == ("token_level_rewards", "response_mask", "uid")
    assert required_columns(ADV_ESTIMATOR_REGISTRY["gae"], ()) == ("token_level_rewards", "response_mask", "values")
    assert required_columns(ADV_ESTIMATOR_REGISTRY["remax"], ())[-1] == "reward_baselines"
    assert required_columns(ADV_ESTIMATOR_REGISTRY["gdpo"], ()) == ("token_level_rewards", "response_mask", "uid")
    assert required_columns(ADV_ESTIMATOR_REGISTRY["optimal_token_baseline"], ())[-2:] == (
        "old_log_probs",
        "sum_pi_squared",
    )


def test_missing_settings_are_found_before_anything_runs():
    dro, gdpo = POLICY_LOSS_REGISTRY["dro"], ADV_ESTIMATOR_REGISTRY["gdpo"]
    assert missing_settings(dro, {}) == missing_settings(dro, {"dro_beta": None}) == ("dro_beta",)
    assert missing_settings(dro, {"dro_beta": 0.1}) == ()
    assert missing_settings(gdpo, SETTINGS) == ("gdpo_reward_keys",)
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        assert [name for name, fn in registry.items() if missing_settings(fn, {})] in (["gdpo"], ["dro"])


def test_settings_of_a_function_are_checked_by_name_and_type():
    def loss(log_prob, low=0.1, *, high: float):
        pass

    def check(fn, settings, extra):
        check_settings("loss", fn, settings | extra, "kwargs", extra)

    check(loss, {"other": 1}, {"low": 1, "high": 2})
    check(loss, {"high": 0.5}, {})
    check(theirs, {}, {"anything": 1})  # it takes the config
    for settings, extra, message in (
        ({}, {"low": 0.2}, "loss needs the setting 'high': set kwargs.high"),
        ({"high": 0.5}, {"lo": 0.2}, "kwargs.lo: loss has no such setting: did you mean 'low'"),
        ({"high": 0.5}, {"log_prob": 0.2}, "kwargs.log_prob: loss has no such setting"),
        ({}, {"high": "far"}, "kwargs.high: expected float, found 'far'"),
    ):
        with pytest.raises(ValueError, match=message):
            check(loss, settings, extra)


def test_all_columns_at_once_are_read_only():
    def wide(columns):
        pass

    bound = bind_arguments(wide, COLUMNS, {})["columns"]
    assert dict(bound) == COLUMNS
    with pytest.raises(TypeError):
        bound["uid"] = "other"


def test_what_a_function_takes_where_it_is_there():
    def mine(uid, index=None, *, values=None, gamma=1.0):
        pass

    assert optional_columns(mine, ["values", "returns"]) == ("values",)
    assert optional_columns(mine, ["uid", "gamma"]) == ("uid", "gamma")  # `index` is the column uid
    assert not reads_all_columns(mine) and reads_all_columns(lambda columns: None)


def test_settings_are_read_only_and_can_travel():
    settings = Settings(SETTINGS)
    with pytest.raises(AttributeError, match="read-only"):
        settings.gamma = 1.0
    with pytest.raises(AttributeError, match="no setting is called 'gama': did you mean 'gamma'"):
        _ = settings.gama
    for copied in (pickle.loads(pickle.dumps(settings)), copy.deepcopy(settings)):
        assert copied == settings
    assert "gamma" in repr(settings)
