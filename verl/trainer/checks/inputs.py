"""Checks of the loaded inputs, and of the reward values that the compiled flow writes."""

from verl.config import schema
from verl.data.collate import check_dataset
from verl.data.mixture import datasets_of
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.registry import did_you_mean
from verl.trainer.checks.model_limits import check_reads_tokens_of
from verl.trainer.checks.preflight import Run
from verl.trainer.ppo.dynamic_sampling import SUMMED_REWARD
from verl.trainer.startup.roles import roles_of


def check_items(run: Run) -> None:
    """The first item of each dataset has the required keys."""
    for dataset in (run.inputs.train_dataset, run.inputs.val_dataset):
        if dataset is not None:
            check_dataset(dataset, run.inputs.collate)


def check_validation_data(run: Run) -> None:
    """If validation is requested, there is validation data."""
    trainer = run.config.trainer
    setting = "trainer.val_only=true" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
    if run.inputs.val_dataset is None and (trainer.val_only or trainer.test_freq not in (-1, 0)):
        raise ValueError(f"{setting} requests validation, but data.val_files is empty: set it, or remove {setting}")


def check_model_limits(run: Run) -> None:
    """Token ids, lengths and the rollout engine fit the model. Of a custom dataset, only the first item is checked."""
    config, inputs, limits = run.config, run.inputs, run.inputs.limits
    dataset = inputs.train_dataset
    if isinstance(config, schema.SFTConfig):
        if isinstance(dataset, SFTDataset):
            limits.check_vocabulary(inputs.tokenizer, dataset.largest_token_id)
            limits.check_sequence_length(dataset.longest_row, "data.max_length")
        return
    parts = datasets_of(dataset)
    if all(isinstance(part, RLHFDataset) and part.is_tokenized for part in parts):
        largest, longest = max(part.largest_token_id for part in parts), max(part.longest_prompt for part in parts)
    else:
        prompt = inputs.collate([dataset[0]]).non_tensor_batch["prompt_ids"][0]
        largest, longest = max(prompt), len(prompt)
    limits.check_vocabulary(inputs.tokenizer, largest)
    if "critic" in roles_of(config):
        check_reads_tokens_of(limits.path, inputs.tokenizer, config.critic.model, "critic", largest)
    if config.actor_rollout_ref.rollout.mode == "server":  # agents write their own prompts
        longest = max(longest, config.actor_rollout_ref.rollout.prompt_length)
    limits.check_engine(config.actor_rollout_ref.rollout)
    limits.check_response_length(
        longest,
        config.actor_rollout_ref.rollout.response_length,
        "data.max_response_length",
        "filter longer prompts (data.max_prompt_length with data.filter_overlong_prompts=true)",
    )


def check_recipe_inputs(run: Run) -> None:
    """The loaded data is valid for the recipe."""
    if run.recipe.check_inputs is not None:
        run.recipe.check_inputs(run.config, run.inputs)


def check_reward_names(run: Run) -> None:
    """Reward values that settings refer to are returned by the reward function or written by an operator."""
    algorithm = run.config.algorithm
    named: dict[str, list[str]] = {}
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in SUMMED_REWARD:
        named["algorithm.filter_groups.metric"] = [algorithm.filter_groups.metric]
    if algorithm.adv_estimator == "gdpo":
        named["algorithm.gdpo_reward_keys"] = algorithm.gdpo_reward_keys
    known = {"reward", *run.reward_values}
    for key, names in named.items():
        for name in names:
            if name not in known and not {name, f"reward_{name}"} & run.columns:
                raise ValueError(f"{key}: the reward function does not return {name!r}: {did_you_mean(name, known)}")
