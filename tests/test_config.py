"""The config: what fits, what is refused and how it is said, what reaches a file."""

import dataclasses
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainer.config import (
    ABSENT,
    CommonConfig,
    OptimizationConfig,
    complete_config,
    config_differences,
    get_target,
    instantiate,
    section_classes,
    to_plain,
    typed_keys,
)
from trainer.errors import ConfigError
from trainer.targets import saved_target_problem

STOPS = {"optimization": {"max_update": 10}}


def refusal(mapping) -> str:
    with pytest.raises(ConfigError) as caught:
        complete_config(mapping)
    return str(caught.value)


def with_stop(**sections) -> dict:
    return {**sections, "optimization": {"max_update": 10, **sections.get("optimization", {})}}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the current folder: a task with a Config, a model, a function that must never run."""
    name = "own_module_of_a_test"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from typing import Optional
            import torch
            from trainer import Trainer

            called = []

            class Task(Trainer):
                @dataclass
                class Config:
                    classes: int = 10
                    data: str = "here"
                    split: Optional[str] = None

            class Model(torch.nn.Module):
                def __init__(self, width: int, dropout: float = 0.0, name: str = "m"):
                    super().__init__()
                    self.arguments = (width, dropout, name)

            class Anything(torch.nn.Module):
                def __init__(self, **anything):
                    super().__init__()
                    self.anything = anything

            class NotATask:
                pass

            def function(**arguments):
                called.append(arguments)
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


# Completing


def test_an_almost_empty_mapping_becomes_a_whole_config():
    cfg = complete_config(STOPS)
    for name, cls in section_classes().items():
        assert set(cfg[name]) == {field.name for field in dataclasses.fields(cls)}
    assert cfg.common.seed == 1 and cfg.optimization.max_update == 10 and cfg.model is None
    assert cfg.run_dir == "outputs/run" and cfg.checkpoint.save_dir == "outputs/run/checkpoints"


def test_completing_twice_changes_nothing_and_leaves_the_argument_alone(module):
    mapping = with_stop(task={"_target_": f"{module}.Task", "classes": "1e1"}, optimization={"lr": ["1e-4"]})
    before = OmegaConf.to_container(OmegaConf.create(mapping))
    once = complete_config(mapping)
    assert complete_config(once) == once
    assert mapping == before


def test_every_field_says_what_it_means():
    for cls in section_classes().values():
        for field in dataclasses.fields(cls):
            assert field.metadata.get("help"), f"{cls.__name__}.{field.name}"


def test_the_home_folder_is_meant_by_a_tilde_at_the_start_only(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    assert complete_config({**STOPS, "run_dir": "~/runs/a"}).checkpoint.save_dir == "/somebody/runs/a/checkpoints"
    assert complete_config({**STOPS, "run_dir": "a~b=c,d e"}).run_dir == "a~b=c,d e"


# Numbers and text (field report 85)


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "0.0001", 1e-4, "+1e-4", ["1e-4"], [1e-4]])
def test_numbers_are_numbers_however_they_are_written(written):
    lr = complete_config(with_stop(optimization={"lr": written})).optimization.lr
    assert lr == 1e-4 and type(lr) is float


def test_numbers_of_a_yaml_file_are_the_numbers_of_a_dictionary():
    import yaml

    text = "optimization: {lr: 1e-4, max_update: 1e3, clip_norm: 1}"
    from_yaml = complete_config(yaml.safe_load(text))  # its 1e-4 is text
    assert from_yaml == complete_config(OmegaConf.create(text))
    assert from_yaml.optimization.max_update == 1000 and type(from_yaml.optimization.max_update) is int


@pytest.mark.parametrize("value", [202410, 1.23e6, True, False, 1000])
def test_a_text_field_that_holds_something_else_is_refused_by_name_with_how_to_quote_it(value):
    message = refusal(with_stop(checkpoint={"save_dir": value}))
    assert "checkpoint.save_dir takes text" in message and "quotes" in message


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="$\\"), min_size=1).filter(
        lambda text: not text.startswith("~")
    )
)
def test_a_text_field_holds_exactly_the_text_given(text):
    assert complete_config({**STOPS, "run_dir": text}).run_dir == text


@pytest.mark.parametrize(
    "section, field, value",
    [
        ("optimization", "max_update", 1.5),
        ("optimization", "max_update", "many"),
        ("optimization", "max_update", True),
        ("optimization", "lr", float("nan")),
        ("optimization", "lr", None),
        ("common", "fp16", "maybe"),
        ("common", "fp16", 2),
        ("common", "seed", {"a": 1}),
        ("dataset", "train_subset", None),
        ("common", "log_format", "riche"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(section, field, value):
    assert f"{section}.{field} takes" in refusal(with_stop(**{section: {field: value}}))


def test_a_mistyped_choice_brings_the_one_that_is_meant():
    assert "Did you mean rich?" in refusal(with_stop(common={"log_format": "riche"}))


@pytest.mark.parametrize("field", ["lr", "update_freq"])
def test_of_a_list_only_one_number_is_taken(field):
    assert complete_config(with_stop(optimization={field: [2]})).optimization[field] == 2
    assert "one number" in refusal(with_stop(optimization={field: [2, 3]}))
    assert "one number" in refusal(with_stop(optimization={field: []}))


# Unknown keys


@pytest.mark.parametrize(
    "mapping, meant",
    [
        ({"optimisation": {}}, "optimization"),
        ({"optimization": {"max_updates": 3}}, "optimization.max_update"),
        ({"max_update": 3}, "optimization.max_update"),
        ({"common": {"lr": 0.1}}, "optimization.lr"),
        ({"checkpoint": {"pacience": 3}}, "checkpoint.patience"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_that_exists(mapping, meant):
    message = refusal({**mapping, "optimization": {"max_epoch": 1, **mapping.get("optimization", {})}})
    assert f"Did you mean {meant}?" in message


def test_all_mistakes_come_in_one_error():
    message = refusal({"common": {"sead": 1, "log_interval": 0}, "optimization": {"lr": "fast"}, "modle": None})
    assert message.startswith("4 settings")
    for part in ("common.sead", "common.log_interval", "optimization.lr", "modle"):
        assert part in message


@pytest.mark.parametrize("value", [3, "digits", [1]])
def test_a_section_that_is_no_mapping_is_refused(value):
    assert "common is a section" in refusal({**STOPS, "common": value})
    assert "task is a section" in refusal({**STOPS, "task": value})


# Values that are impossible, alone or together


@pytest.mark.parametrize(
    "section, field, value",
    [
        ("common", "seed", -1),
        ("common", "num_threads", -1),
        ("common", "log_interval", 0),
        ("common", "min_loss_scale", 0),
        ("optimization", "max_epoch", -1),
        ("optimization", "stop_time_hours", -0.5),
        ("optimization", "clip_norm", -1),
        ("optimization", "update_freq", 0),
        ("optimization", "global_batch_size", -1),
        ("optimization", "lr", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(section, field, value):
    message = refusal(with_stop(**{section: {field: value}}))
    assert f"{section}.{field} is {value}" in message and "must be" in message
    assert "or less" not in message  # no advice that follows from a value that is none


def test_the_ranges_include_their_ends():
    assert CommonConfig(seed=0, log_interval=1, fp16_scale_window=None).problems() == []
    assert OptimizationConfig(clip_norm=0, update_freq=1, lr=1e-12).problems() == []


def test_a_run_that_nothing_would_end_is_refused():
    message = refusal({})
    for key in ("max_update", "max_epoch", "stop_time_hours"):
        assert f"optimization.{key}" in message
        complete_config({"optimization": {key: 1}})


@pytest.mark.parametrize(
    "other", [("optimization", "update_freq", 2), ("dataset", "max_tokens", 100), ("dataset", "batch_size", 17)]
)
def test_a_global_batch_size_beside_what_contradicts_it_is_refused(other):
    section, key, value = other
    sections = {"dataset": {"batch_size": 4}, "optimization": {"global_batch_size": 16, "max_update": 1}}
    complete_config(sections)
    sections[section] = {**sections[section], key: value}
    message = refusal(sections)
    assert "optimization.global_batch_size=16" in message and f"{section}.{key}={value}" in message


def test_both_half_precisions_are_refused():
    assert "exclude each other" in refusal(with_stop(common={"fp16": True, "bf16": True}))


def test_restoring_and_finetuning_together_are_refused():
    both = {"restore_file": "a.pt", "finetune_from_model": "b.pt"}
    assert all(f"checkpoint.{key}" in refusal(with_stop(checkpoint=both)) for key in both)
    for key, value in both.items():
        complete_config(with_stop(checkpoint={key: value}))


@pytest.mark.parametrize(
    "wish",
    [{"patience": 3}, {"keep_best_checkpoints": 2}, {"best_checkpoint_metric": "accuracy"}],
    ids=lambda wish: list(wish)[0],
)
@pytest.mark.parametrize("dataset", [{"valid_subset": ""}, {"valid_subset": None}, {"validate_interval": 0}], ids=str)
def test_what_needs_a_validation_is_refused_without_one(wish, dataset):
    message = refusal(with_stop(dataset=dataset, checkpoint=wish))
    assert f"checkpoint.{list(wish)[0]} needs a validation" in message
    complete_config(with_stop(checkpoint=wish))
    complete_config(with_stop(dataset=dataset))


# Nodes


def test_a_task_is_checked_against_its_config_and_gets_its_defaults(module):
    cfg = complete_config(with_stop(task={"_target_": f"{module}.Task", "classes": "12"}))
    assert cfg.task == {"_target_": f"{module}.Task", "classes": 12, "data": "here", "split": None}
    message = refusal(with_stop(task={"_target_": f"{module}.Task", "clases": 3, "data": 202410}))
    assert "task.clases" in message and "Did you mean classes?" in message and "task.data takes text" in message


def test_a_task_that_is_given_as_a_class_is_checked_without_being_named(module):
    task_class = get_target(f"{module}.Task")
    assert complete_config(STOPS, task_class).task.classes == 10
    with pytest.raises(ConfigError, match="Did you mean classes"):
        complete_config({**STOPS, "task": {"clases": 3}}, task_class)
    assert complete_config({**STOPS, "task": {"anything": 3}}).task.anything == 3  # nobody knows the class


def test_a_model_is_checked_against_its_constructor(module):
    node = {"_target_": f"{module}.Model", "width": "1e1", "dropout": "1e-1", "name": "2024_10"}
    model = instantiate(complete_config(with_stop(model=node)).model)
    assert model.arguments == (10, 0.1, "2024_10")
    assert "Did you mean width?" in refusal(with_stop(model={"_target_": f"{module}.Model", "widht": 3}))
    assert "model.name takes text" in refusal(with_stop(model={"_target_": f"{module}.Model", "name": 202410}))
    complete_config(with_stop(model={"_target_": f"{module}.Anything", "whatever": 3}))


def test_an_optimizer_takes_torchs_own_names_and_groups():
    node = {"_target_": "torch.optim.SGD", "momentum": "9e-1", "groups": [{"pattern": "bias", "weight_decay": 0}]}
    assert complete_config(with_stop(optimizer=node)).optimizer.momentum == 0.9
    assert "optimization.lr" in refusal(with_stop(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1}))
    assert "Did you mean momentum?" in refusal(with_stop(optimizer={"_target_": "torch.optim.SGD", "momentun": 0.9}))


@pytest.mark.parametrize("name", ["model", "criterion", "optimizer", "lr_scheduler", "task"])
@pytest.mark.parametrize(
    "target", ["os.system", "collections.OrderedDict", "nowhere.Class", "torch.nn.Linaer", "torch", "a b.c", 3]
)
def test_a_target_that_is_no_class_of_the_kind_is_refused_by_name(name, target):
    assert f"{name}._target_" in refusal(with_stop(**{name: {"_target_": target}}))


# Targets


def test_functions_are_never_called(module):
    with pytest.raises(ConfigError, match="function"):
        instantiate({"_target_": f"{module}.function", "a": 1})
    with pytest.raises(ConfigError, match="function"):
        instantiate({"_target_": f"{module}.Anything", "inner": {"_target_": f"{module}.function"}})
    assert sys.modules[module].called == []


def test_an_instance_gets_plain_containers_nested_objects_and_what_is_given_besides(module):
    node = OmegaConf.create(
        {
            "_target_": f"{module}.Anything",
            "a": [1, {"b": 2}],
            "inner": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3},
        }
    )
    built = instantiate(node, a_thing=7).anything
    assert built["a"] == [1, {"b": 2}] and type(built["a"]) is list and type(built["a"][1]) is dict
    assert isinstance(built["inner"], torch.nn.Linear) and built["a_thing"] == 7


def test_a_constructor_that_lacks_an_argument_is_told_by_the_config_its_own_errors_are_not(module):
    with pytest.raises(ConfigError, match="model: .*width"):
        instantiate({"_target_": f"{module}.Model"}, where="model")


def test_a_wrong_kind_and_a_misspelt_class_say_what_was_expected(module):
    with pytest.raises(ConfigError, match="not a subclass of torch.nn.modules.module.Module"):
        get_target({"_target_": f"{module}.NotATask"}, torch.nn.Module)
    with pytest.raises(ConfigError, match="Did you mean Model"):
        get_target({"_target_": f"{module}.Modle"})


def test_an_error_while_a_module_is_imported_is_told_with_its_cause(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_a_test.py").write_text("import module_that_is_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="module_that_is_not_installed"):
        get_target("broken_module_of_a_test.Task")


def test_of_a_saved_config_only_known_kinds_of_trusted_places_are_taken(module, monkeypatch):
    assert saved_target_problem("torch.nn.Linear", "model") is None
    assert saved_target_problem("torch.optim.AdamW", "optimizer") is None
    assert saved_target_problem("torch.optim.lr_scheduler.StepLR", "lr_scheduler") is None
    assert saved_target_problem("trainer.lr_scheduler.Cosine", "lr_scheduler") is None
    assert saved_target_problem(f"{module}.Task", "task") is None
    assert saved_target_problem(f"{module}.Model", "model") is None
    for target in (
        "os.system",
        "torch.hub.load_state_dict_from_url",
        "pathlib.Path.write_text",
        "subprocess.Popen",
        "torch.nn.init.math.exp",
        "trainer.config.os.system",
        "trainer.sweep.Path",
        f"{module}.function",
        f"{module}.NotATask",
        7,
    ):
        assert saved_target_problem(target, "model._target_"), target
    monkeypatch.chdir("/")
    assert "current folder" in saved_target_problem(f"{module}.Model", "model._target_")
    assert saved_target_problem(f"{module}.Model", "model._target_", [module]) is None


def test_a_saved_name_that_is_not_trusted_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "untrusted_module_of_a_test.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    assert saved_target_problem("untrusted_module_of_a_test.Model", "model._target_")
    assert "untrusted_module_of_a_test" not in sys.modules


# Plain and compared


def test_what_goes_through_a_resolver_stays_text_and_the_rest_is_resolved(monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "hunter2")
    cfg = complete_config(
        with_stop(
            run_dir="a/${common.seed}",
            common={"wandb_project": "${oc.env:SECRET_OF_A_TEST}"},
            task={
                "token": "x-${common.wandb_project}",
                "list": ["${run_dir}", "${oc.env:SECRET_OF_A_TEST}"],
                "all": "${common}",
            },
        )
    )
    assert cfg.common.wandb_project == "hunter2"
    plain = to_plain(cfg)
    assert plain["common"]["wandb_project"] == "${oc.env:SECRET_OF_A_TEST}"
    assert plain["task"] == {
        "token": "x-${common.wandb_project}",
        "list": ["a/1", "${oc.env:SECRET_OF_A_TEST}"],
        "all": "${common}",
    }
    assert plain["checkpoint"]["save_dir"] == "a/1/checkpoints"
    assert "hunter2" not in repr(plain)


def test_plain_means_plain_containers_and_survives_yaml(tmp_path):
    odd = ["2024_10", "123E4", "1_000", "yes", "null", "~", "1e-4", "0x10", "a: b", "# c", " x ", "", "???x", "\n"]
    plain = to_plain(complete_config(with_stop(task={"odd": odd, "nest": {"a": {"b": (1, 2)}}})))
    assert plain["task"] == {"odd": odd, "nest": {"a": {"b": [1, 2]}}} and type(plain["task"]["odd"]) is list
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == plain


def test_a_number_of_the_environment_is_a_number_and_stays_a_reference(monkeypatch):
    monkeypatch.setenv("LR_OF_A_TEST", "1e-4")
    cfg = complete_config(with_stop(optimization={"lr": "${oc.env:LR_OF_A_TEST}"}))
    assert cfg.optimization.lr == 1e-4 and type(cfg.optimization.lr) is float
    assert to_plain(cfg)["optimization"]["lr"] == "${oc.env:LR_OF_A_TEST}"
    assert complete_config(cfg).optimization.lr == 1e-4


def test_a_reference_to_nothing_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("NOT_THERE_OF_A_TEST", raising=False)
    assert "common.wandb_project" in refusal(with_stop(common={"wandb_project": "${oc.env:NOT_THERE_OF_A_TEST}"}))
    assert "run_dir" in refusal({**STOPS, "run_dir": "${nothing}"})
    assert "optimization.lr must be given" in refusal(with_stop(optimization={"lr": "???"}))


def test_differences_name_each_leaf_with_both_values():
    saved = to_plain(complete_config(with_stop(task={"a": 1, "b": [1], "gone": 2, "same": {"x": 1}})))
    now = to_plain(
        complete_config(with_stop(optimization={"lr": 0.5}, task={"a": True, "b": [2], "new": None, "same": {"x": 1}}))
    )
    assert config_differences(saved, now) == [
        ("task.a", 1, True),
        ("task.b", [1], [2]),
        ("task.new", ABSENT, None),
        ("optimization.lr", 1e-3, 0.5),
        ("task.gone", 2, ABSENT),
    ]
    assert config_differences(now, now) == []


def test_typed_keys_are_what_the_overrides_name():
    assert typed_keys(["a.b=c=d", "++x=1", "~y", "model@m=z"]) == {"a.b", "x", "y", "model"}
