"""python -m verl.recipe.rep_exp.main_rep_exp key=value ...: exploration by representations, with rep_exp.yaml below.

Tuyls et al. 2025 (arXiv 2510.11686): ... gen -> reward -> explore -> adv -> update_actor, and a role that represents.
"""

import sys
from pathlib import Path

import torch

from verl.config.fields import Section, field, section
from verl.config.schema.ppo import Config
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.rewards.responses import reward_tensor
from verl.single_controller import Dispatch, WorkerSpec, register
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.output.metrics import group_rows
from verl.trainer.ppo.operators import SEQUENCES
from verl.trainer.ppo_trainer import PPOTrainer
from verl.workers.engine_worker import micro_batching
from verl.workers.policy import RefWorker


class RepExpSection(Section):
    """`rep_exp`: the bonus of a response."""

    beta: float = field(0.01, "weight of the bonus, which is between 0 and 1", ge=0)
    dim: int = field(32, "size to which hidden states are projected", ge=1)
    ridge: float = field(0.01, "added to the diagonal of the covariance", gt=0)


class RepExpConfig(Config):
    """The root of a configuration."""

    rep_exp: RepExpSection = section(RepExpSection, "exploration")


class RepresentationWorker(RefWorker):
    """Represents responses by the initial policy, with the settings of `ref` for an engine of torch."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_features(self, batch: DataProto) -> DataProto:
        """Column features (B, meta_info["dim"]): the mean of the last hidden states from which the tokens of a response
        were sampled, by a sparse random projection (Li et al. 2006) that meta_info["seed"] determines."""
        model, dim, ref = self.engine.model, batch.meta_info["dim"], self.config.ref
        share = (size := model.module.config.get_text_config().hidden_size) ** -0.5  # of the entries that are not 0
        draws = torch.rand(size, dim, generator=torch.Generator().manual_seed(batch.meta_info["seed"]))
        signs = (draws < share / 2).float() - (draws > 1 - share / 2).float()
        weight = (signs / (share * dim) ** 0.5).to(self.engine.device)
        model.kind = "value"
        del model.head  # a module, which a function cannot replace
        model.head = lambda states: (states.float() @ weight)[:, None]
        keys = "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"
        states = self.engine.infer(batch, ("values",), micro_batching(*(ref[key] for key in keys)))["values"]
        mask = batch.batch["response_mask"][..., None]
        return DataProto.from_dict({"features": (states * mask).sum(1) / mask.sum(1).clamp(min=1)})


def leverage(features: torch.Tensor, ridge: float) -> torch.Tensor:
    """h^T (ridge I + H^T H)^-1 h of each row h of the centered features H (B, d): (B,), between 0 and 1."""
    centered = features.double() - features.double().mean(0)
    covariance = centered.T @ centered + ridge * torch.eye(centered.shape[1], dtype=torch.float64)
    return (centered * torch.linalg.solve(covariance, centered.T).T).sum(1).float()


class RepExpTrainer(PPOTrainer):
    """Exploration by representations on the cluster of trainer.backend."""

    recipe = Recipe("representation-based exploration", Path(__file__).with_name("rep_exp.yaml"), RepExpConfig)

    def build_flow(self) -> DataFlow:
        settings = self.config.rep_exp

        def explore(batch: DataProto) -> DataProto:
            rows = batch.select([*SEQUENCES, "response_mask"], [], [])
            rows.meta_info |= {"seed": batch.meta_info["global_step"], "dim": settings.dim}
            features = self.roles["representation"].compute_features(rows).batch["features"]
            bonus, scores = torch.zeros(len(batch)), batch.batch["token_level_scores"].sum(1)
            for group in group_rows(batch):
                if (scores[group] > 0).any():  # without a correct response, the bonus would be the only signal
                    bonus[group] = leverage(features[group], settings.ridge)
            rewards = batch.batch["token_level_rewards"] + settings.beta * reward_tensor(batch, bonus)
            metrics = {"rep_exp/bonus_mean": bonus.mean().item()}
            return DataProto.from_dict({"token_level_rewards": rewards}, meta_info={"metrics": metrics})

        reads = (*SEQUENCES, "response_mask", "uid", "token_level_scores", "token_level_rewards")
        operator = Operator("explore", explore, reads, "token_level_rewards", on="representation")
        return super().build_flow().insert_after("reward", operator)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        kwargs = {"config": self.config.actor_rollout_ref, "device": self.config.trainer.device}
        return super().worker_specs() | {"representation": WorkerSpec(RepresentationWorker, kwargs)}


if __name__ == "__main__":
    sys.exit(main(trainer=RepExpTrainer, program="verl.recipe.rep_exp.main_rep_exp"))
