"""The operators of policy optimisation: what runs at each step of the flow that `ppo_flow` builds."""

IMPORTS

#: what `gen` adds to the prompts
GENERATED = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "rollout_log_probs",
)
#: names that values beside a score cannot have: reward_<name> is a column or a metric of something else
RESERVED_EXTRAS = {"model", "baselines", "failed_rows", "empty_responses", "greedy_mean", "tied_groups"}
#: what a forward pass over whole sequences reads
SEQUENCES = ("input_ids", "attention_mask", "position_ids", "responses")


Roles = Mapping[str, WorkerGroup]


class Prompts(Stateful):
    """The source of training prompts.

    meta_info has the step that they are for (global_step), and what the strict check of token ids needs (vocab_size).
    """

    def __init__(self, source: PromptSource, step: Callable[[], int], vocab_size: int):
        self.source = source
        self.step = step
        self.vocab_size = vocab_size

    def facts(self) -> dict[str, Any]:
        return {"global_step": self.step(), "vocab_size": self.vocab_size}

    def __call__(self) -> DataProto:
        batch = self.source()
        batch.meta_info.update(self.facts())
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


def repeat(n: int) -> Callable[[DataProto], DataProto]:
    """Every prompt n times, side by side, with the column sample_index: 0 .. n-1 within a prompt."""

    def repeat_prompts(batch: DataProto) -> DataProto:
        return batch.repeat(n).replace(sample_index=np.tile(np.arange(n), len(batch)).astype(object))

    return repeat_prompts


def generate(roles: Roles, sampling: str) -> Callable[[DataProto], DataProto]:
    """Answers to the batch's prompts. sampling: "train", "greedy" or "validate"."""

    def gen(batch: DataProto) -> DataProto:
        asked = batch.select([], ["prompt_ids", "uid", "sample_index"], [])
        asked.meta_info["sampling"] = sampling
        return roles["rollout"].generate_sequences(asked)

    return gen


class Reward:
    """Scores of the answers, by the reward manager.

    shuffle_seed: when given, what the reward function returns is dealt out to the rows at random: a control, in which
    nothing can be learnt. The scores and all values beside them move together, so that no estimator sees the truth.
    """

    def __init__(self, manager: RewardManager, shuffle_seed: int | None = None):
        self.manager = manager
        self.shuffle_seed = shuffle_seed

    def __call__(self, batch: DataProto) -> DataProto:
        scored = self.manager(batch, return_dict=True)
        scores, extra = scored["reward_tensor"], scored["reward_extra_info"]
        taken = sorted({*extra} & RESERVED_EXTRAS)
        if taken:
            raise ValueError(f"the reward function returns the value {taken[0]!r}, a name that is in use: rename it")
        metrics = dict(scored["metrics"])
        if self.shuffle_seed is not None:
            order = self._shuffled_rows(batch)
            scores = _moved_to_the_end(scores[order], batch.batch["response_mask"])
            extra = {name: [values[i] for i in order] for name, values in extra.items()}
        for name, values in extra.items():
            numbers = [float(v) for v in values if isinstance(v, bool | int | float | np.number)]
            if len(numbers) == len(values) and numbers:
                metrics[f"reward/{name}"] = sum(numbers) / len(numbers)
        columns = {f"reward_{name}": values for name, values in extra.items()}
        result = DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": scores}, columns)
        result.meta_info["metrics"] = metrics
        return result

    def _shuffled_rows(self, batch: DataProto) -> list[int]:
        seed = fork_seed(self.shuffle_seed, *map(str, batch.non_tensor_batch["uid"][:8]))
        return torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()


def _moved_to_the_end(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of each row of scores (B, T), at the last token of that row's response."""
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    return torch.zeros_like(scores).scatter(1, last[:, None], scores.sum(1)[:, None])


def model_scores(roles: Roles) -> Callable[[DataProto], DataProto]:
    """The reward model's scores, rm_scores. Where its tokenizer is not the policy's it reads raw_prompt."""

    def rm(batch: DataProto) -> DataProto:
        dialogues = ["raw_prompt"] if "raw_prompt" in batch else []
        found = roles["reward"].compute_rm_score(batch.select([*SEQUENCES, "response_mask"], dialogues, []))
        found.meta_info["metrics"] = {"reward/rm_score_mean": found.batch["rm_scores"].sum(1).mean().item()}
        return found

    return rm


def reward_baseline(config: schema.Config, roles: Roles, manager: RewardManager) -> Callable[[DataProto], DataProto]:
    """The reward of one greedy answer to each prompt (ReMax, Li et al. 2023, arXiv 2310.10505)."""

    def greedy_reward(batch: DataProto) -> DataProto:
        uids, first, group = np.unique(
            batch.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True
        )
        prompts = batch.select([], None)[first].replace(sample_index=np.zeros(len(uids), dtype=object))
        answered = prompts.union(generate(roles, "greedy")(prompts))
        if config.reward.reward_model.enable:
            answered = answered.union(model_scores(roles)(answered))
        scores = manager(answered, return_dict=True)["reward_tensor"].sum(1)
        return DataProto.from_dict(
            {"reward_baselines": scores[group]}, meta_info={"metrics": {"reward/greedy_mean": scores.mean().item()}}
        )

    return greedy_reward


def old_log_prob(roles: Roles, extra: tuple[str, ...]) -> Callable[[DataProto], DataProto]:
    """Log-probs of the policy as it is before the update, and its entropy."""

    def recompute(batch: DataProto) -> DataProto:
        asked = batch.select(list(SEQUENCES), [], [])
        asked.meta_info["outputs"] = ("entropys", *extra)
        found = roles["actor"].compute_log_prob(asked)
        mask = batch.batch["response_mask"].bool()
        gap = (found.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).abs()[mask]
        found.meta_info["metrics"] = {
            "actor/entropy": found.batch["entropys"][mask].mean().item(),
            "rollout/logprob_gap_mean": gap.mean().item(),
            "rollout/logprob_gap_max": gap.max().item(),
        }
        return found

    return recompute


def ref_log_prob(roles: Roles) -> Callable[[DataProto], DataProto]:
    """Log-probs of the reference policy."""

    def ref(batch: DataProto) -> DataProto:
        return roles["ref"].compute_ref_log_prob(batch.select(list(SEQUENCES), [], []))

    return ref


def values(roles: Roles) -> Callable[[DataProto], DataProto]:
    """The critic's values."""

    def compute_values(batch: DataProto) -> DataProto:
        return roles["critic"].compute_values(batch.select(list(SEQUENCES), [], []))

    return compute_values


class KLInReward(Stateful):
    """reward_t <- reward_t - coefficient * KL_t; the coefficient may be steered, so it is state.

    It takes from the rewards as they are then, so that what an operator before it did to them stays.
    """

    def __init__(self, controller: FixedKLController, kind: str):
        self.controller = controller
        self.kind = kind

    def __call__(self, batch: DataProto) -> DataProto:
        columns = batch.tensors
        coefficient = self.controller.value
        rewards, kl = apply_kl_penalty(
            columns["token_level_rewards"],
            columns["old_log_probs"],
            columns["ref_log_prob"],
            columns["response_mask"],
            kl_coef=coefficient,
            kl_penalty_kind=self.kind,
        )
        self.controller.update(kl, len(batch))
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        return DataProto.from_dict({"token_level_rewards": rewards}, meta_info={"metrics": metrics})

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)


def advantage(algorithm: schema.AlgorithmConfig) -> Callable[[DataProto], DataProto]:
    """Advantages and returns by the configured estimator, its parameters bound by name."""
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    settings = estimator_settings(algorithm)

    def adv(batch: DataProto) -> DataProto:
        columns = {**batch.non_tensor_batch, **batch.tensors}
        advantages, returns = estimator(**bind_arguments(estimator, columns, settings))
        return DataProto.from_dict({"advantages": advantages, "returns": returns})

    return adv


@dataclass(frozen=True)
class UpdatePlan:
    """How a batch is gone through. mini_batch_rows: responses of one optimizer step, over all ranks. epochs: passes.

    shuffle: each pass in an order of its own, by seed and step. warmup: training steps in which nothing is done (the
    critic learns first). together: consecutive rows that are never parted (a pair is 2).
    """

    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    warmup: int = 0
    together: int = 1


def arrange(lengths: Sequence[int], plan: UpdatePlan, ranks: int, seed: int) -> list[int]:
    """Units (rows, or rows that stay together) in the order of one pass, so that equal shares of it go to the ranks.

    A mini-batch holds the same rows however many ranks there are: each rank gets its part of every mini-batch, parts
    of about the same number of tokens, one mini-batch after another. lengths: tokens of each unit.
    """
    rows = list(range(len(lengths)))
    if plan.shuffle:
        rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    if ranks == 1:
        return rows
    shares: list[list[int]] = [[] for _ in range(ranks)]
    size = plan.mini_batch_rows // plan.together
    for start in range(0, len(rows), size):
        mini = rows[start : start + size]
        for share, part in zip(shares, balanced_partition([lengths[i] for i in mini], ranks, equal_size=True)):
            share += [mini[i] for i in part]
    return [i for share in shares for i in share]


class Update:
    """An update of the actor or the critic: `method` of the role's workers, once for each pass.

    Where the batch has a `loss_mask`, the tokens outside it are left out of the update.
    """

    def __init__(self, roles: Roles, role: str, method: str, plan: UpdatePlan):
        self.roles = roles
        self.role = role
        self.method = method
        self.plan = plan

    def __call__(self, batch: DataProto) -> None:
        step, plan = batch.meta_info["global_step"], self.plan
        if step <= plan.warmup:
            return
        group = self.roles[self.role]
        ranks = group.layout().dp_size
        rows = batch.select(None, [], [])
        if "loss_mask" in rows:
            rows = rows.drop("loss_mask").replace(response_mask=rows.batch["loss_mask"])
        lengths = rows.batch["attention_mask"].sum(1).view(-1, plan.together).sum(1).tolist()
        sums = MetricSums()
        for epoch in range(plan.epochs):
            units = arrange(lengths, plan, ranks, fork_seed(plan.seed, step, epoch))
            order = [unit * plan.together + i for unit in units for i in range(plan.together)]
            share = rows if order == list(range(len(order))) else rows[order]
            facts = {"mini_batch_rows": plan.mini_batch_rows, "last_pass": epoch == plan.epochs - 1}
            share.meta_info.update(facts)
            sums.add(group.submit(self.method, share).get())
        batch.meta_info["metrics"] = {name: total / count for name, (total, count) in sums.result().items()}


