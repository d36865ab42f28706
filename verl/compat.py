"""Module paths of earlier releases: `import verl.engines.hf` returns `verl.engines.torch_engine`.

One import hook resolves the table below at the first import of an old path. Old and new path are the same module
object, so classes keep their identity and pickles of earlier releases load.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

#: old module path -> new module path
MOVED = {
    "verl.utils.checkpoint_store": "verl.checkpoints.store",
    "verl.utils.shard_files": "verl.checkpoints.shard_files",
    "verl.utils.atomic": "verl.checkpoints.atomic",
    "verl.utils.trackers": "verl.tracking.trackers",
    "verl.utils.tracking": "verl.tracking.tracking",
    "verl.utils.progress": "verl.tracking.console",
    "verl.utils.curves": "verl.tracking.curves",
    "verl.utils.headline": "verl.tracking.console",
    "verl.utils.env_machine": "verl.env_check.machine",
    "verl.utils.env_packages": "verl.env_check.packages",
    "verl.utils.env_report": "verl.env_check.report",
    "verl.utils.import_probe": "verl.env_check.probe",
    "verl.utils.statistics": "verl.evaluation.statistics",
    "verl.trainer.answer_parts": "verl.evaluation.shards",
    "verl.trainer.evaluation_flow": "verl.evaluation.score",
    "verl.trainer.evaluation_report": "verl.evaluation.report",
    "verl.trainer.generation_flow": "verl.evaluation.generate",
    "verl.trainer.runtime_env": "verl.single_controller.ray.runtime_env",
    "verl.config.tree": "verl.config.schema",
    "verl.config.tree_actor": "verl.config.schema",
    "verl.config.tree_data": "verl.config.schema",
    "verl.config.tree_model": "verl.config.schema",
    "verl.config.tree_offline": "verl.config.schema",
    "verl.config.tree_rollout": "verl.config.schema",
    "verl.config.tree_sft": "verl.config.schema",
    "verl.config.tree_trainer": "verl.config.schema",
    "verl.config.node": "verl.config.fields",
    "verl.config.dialects": "verl.config.aliases",
    "verl.config.available": "verl.config.supported",
    "verl.invariant.attention": "verl.modeling.batch_invariant.attention",
    "verl.invariant.functions": "verl.modeling.batch_invariant.linear",
    "verl.invariant.kernels": "verl.modeling.batch_invariant.triton_kernels",
    "verl.invariant.pieces": "verl.modeling.batch_invariant.chunked",
    "verl.engines.invariant": "verl.modeling.batch_invariant.model",
    "verl.engines.attention": "verl.modeling.attention",
    "verl.engines.fused_layers": "verl.modeling.fused_layers",
    "verl.engines.layer_functions": "verl.modeling.layers_cpu",
    "verl.engines.layer_kernels": "verl.modeling.layers_triton",
    "verl.engines.layers": "verl.modeling.layers",
    "verl.engines.logits": "verl.modeling.log_probs",
    "verl.engines.logits_kernels": "verl.modeling.log_probs_triton",
    "verl.engines.places": "verl.modeling.indexing",
    "verl.engines.products": "verl.modeling.linear",
    "verl.engines.prompt_sharing": "verl.modeling.shared_prefix",
    "verl.engines.sequence_parallel": "verl.modeling.sequence_parallel",
    "verl.engines.hf": "verl.engines.torch_engine",
    "verl.engines.fsdp": "verl.engines.sharding",
    "verl.engines.model": "verl.engines.loading",
    "verl.rollout.native_plan": "verl.rollout.native.requests",
    "verl.rollout.native_slots": "verl.rollout.native.scheduler",
    "verl.rollout.native_paged": "verl.rollout.native.paged_scheduler",
    "verl.rollout.native_torch": "verl.rollout.native.torch_decoder",
    "verl.rollout.native_cuda": "verl.rollout.native.cuda_decoder",
    "verl.rollout.native_model": "verl.rollout.native.model",
    "verl.rollout.native_exact": "verl.rollout.native.batch_invariant",
    "verl.rollout.native_exact_cuda": "verl.rollout.native.batch_invariant_cuda",
    "verl.rollout.joint_memory": "verl.rollout.native.fused_parameters",
    "verl.rollout.kernels": "verl.rollout.native.triton_kernels",
    "verl.rollout.stopping": "verl.rollout.stop_strings",
    "verl.rewards.gsm8k": "verl.rewards.rules.gsm8k",
    "verl.rewards.maths": "verl.rewards.rules.maths",
    "verl.rewards.choice": "verl.rewards.rules.choice",
    "verl.rewards.formats": "verl.rewards.rules.formats",
    "verl.rewards.accuracy": "verl.rewards.rules.accuracy",
    "verl.rewards.isolation": "verl.rewards.sandbox.pool",
    "verl.rewards.isolation_worker": "verl.rewards.sandbox.worker",
    "verl.rewards.calls": "verl.rewards.sandbox.calls",
    "verl.rewards.code_tests": "verl.rewards.sandbox.code_tests",
    "verl.rewards.programs": "verl.rewards.sandbox.programs",
    "verl.rewards.program_boot": "verl.rewards.sandbox.program_boot",
    "verl.rewards.assert_program": "verl.rewards.sandbox.assert_program",
    "verl.rewards.results": "verl.rewards.outcome",
    "verl.rewards.answers": "verl.rewards.responses",
    "verl.single_controller.local_group": "verl.single_controller.local.group",
    "verl.single_controller.process_pool": "verl.single_controller.local.process_pool",
    "verl.single_controller.worker_process": "verl.single_controller.local.worker_main",
    "verl.single_controller.transport": "verl.single_controller.local.transport",
    "verl.single_controller.column_files": "verl.single_controller.local.column_files",
    "verl.single_controller.ray_group": "verl.single_controller.ray.group",
    "verl.single_controller.ray_placement": "verl.single_controller.ray.placement",
    "verl.single_controller.data_plane": "verl.single_controller.remote_batch",
    "verl.single_controller.remote_tensor": "verl.single_controller.remote_batch",
    "verl.single_controller.pickling": "verl.single_controller.remote_batch",
    # paths of the public verl
    "verl.workers.reward_manager": "verl.rewards.public_managers",
    "verl.workers.reward_manager.abstract": "verl.rewards.public_managers",
    "verl.workers.reward_manager.registry": "verl.rewards.public_managers",
    "verl.experimental.reward_loop.reward_manager": "verl.rewards.public_managers",
    "verl.experimental.reward_loop.reward_manager.base": "verl.rewards.public_managers",
    "verl.experimental.reward_loop.reward_manager.registry": "verl.rewards.public_managers",
    "verl.utils.reward_score": "verl.rewards.resolve",
    "verl.rewards.sources": "verl.rewards.resolve",
    "verl.rewards.model_score": "verl.rewards.resolve",
    "verl.model_merger.source": "verl.model_merger.sources",
    "verl.model_merger.safetensors_folder": "verl.model_merger.sources",
    "verl.model_merger.distributed_checkpoint": "verl.model_merger.sources",
    "verl.model_merger.shard_pickle": "verl.model_merger.fsdp",
    "verl.model_merger.adapter_folder": "verl.model_merger.lora",
    "verl.trainer.setup": "verl.trainer.inputs",
    "verl.trainer.early_checks": "verl.trainer.preflight",
    "recipe.dapo.trainer": "recipe.dapo.main_dapo",
    "recipe.dpo.config": "recipe.dpo.worker",
    "recipe.dpo.offline": "recipe.dpo.flow",
    "recipe.dpo.trainer": "recipe.dpo.main_dpo",
    "recipe.prime.config": "recipe.prime.worker",
    "recipe.prime.trainer": "recipe.prime.main_prime",
    "verl.config.batch_words": "verl.config.batch_summary",
    "verl.engines.distributed": "verl.engines.parallel",
    "verl.engines.tensor_parallel": "verl.engines.parallel",
    "verl.engines.offload": "verl.engines.memory",
    "verl.workers.actor_rollout_ref": "verl.workers.policy",
    "verl.dataflow.one_pass": "verl.dataflow.run",
    "verl.dataflow.results": "verl.dataflow.run",
    "verl.dataflow.order": "verl.dataflow.operator",
    "verl.dataflow.watch": "verl.dataflow.pipeline",
    "verl.algorithms.covariance_losses": "verl.algorithms.policy_losses",
    "verl.algorithms.losses": "verl.algorithms.kl",
    "verl.data.chat_segments": "verl.data.chat",
    "verl.data.dialogues": "verl.data.chat",
}

#: packages that no longer exist but are the parents of moved modules
_PARENTS = {".".join(path.split(".")[:depth]) for path in MOVED for depth in range(1, path.count(".") + 1)}


class _Loader(importlib.abc.Loader):
    def __init__(self, target: str, is_parent: bool):
        self.target, self.is_parent = target, is_parent

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self._spec = module.__spec__
        if self.is_parent and "__path__" not in vars(module):
            module.__path__ = []  # so that the old paths below it are searched for
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the spec of the old path


class _EmptyPackage(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        return None


class MovedModules(importlib.abc.MetaPathFinder):
    """Finds the modules of `MOVED` by their old paths. The last finder, so that existing files take precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MOVED:
            return importlib.util.spec_from_loader(fullname, _Loader(MOVED[fullname], fullname in _PARENTS))
        if fullname in _PARENTS:
            return importlib.util.spec_from_loader(fullname, _EmptyPackage(), is_package=True)
        return None


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.append(MovedModules())
