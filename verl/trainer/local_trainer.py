"""LocalPPOTrainer: everything in this process. For laptops, notebooks and debuggers; a breakpoint just works."""

from verl.single_controller import LocalWorkerGroup, WorkerSpec
from verl.trainer.ppo_flow import needs_critic, needs_reference
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.setup import stop_token_ids
from verl.workers.actor_rollout_ref import ActorRolloutWorker, RefWorker
from verl.workers.critic import CriticWorker


class LocalPPOTrainer(PPOTrainer):
    """Policy optimisation in one process.

    >>> LocalPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()
    """

    def init_workers(self) -> None:
        config = self.config
        policy, device = config.actor_rollout_ref, config.trainer.device
        actor = WorkerSpec(
            ActorRolloutWorker,
            {
                "config": policy,
                "correction": config.algorithm.rollout_correction,
                "device": device,
                "total_training_steps": self.total_steps,
                "response_length": policy.rollout.response_length,
                "pad_token_id": self.tokenizer.pad_token_id,
                "stop_token_ids": stop_token_ids(policy.model.path, self.tokenizer),
            },
        )
        # actor and rollout are one worker: generation runs on the very weights that are trained
        self.roles["actor"] = self.roles["rollout"] = LocalWorkerGroup(actor, name="actor_rollout")
        if needs_reference(config):
            ref = WorkerSpec(RefWorker, {"config": policy, "device": device})
            self.roles["ref"] = LocalWorkerGroup(ref, name="ref")
        if needs_critic(config):
            kwargs = {"config": config.critic, "device": device, "total_training_steps": self.total_steps}
            self.roles["critic"] = LocalWorkerGroup(WorkerSpec(CriticWorker, kwargs), name="critic")
