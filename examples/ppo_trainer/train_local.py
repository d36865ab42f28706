"""PPO in one process as a script: dataset, trainer, fit. Policy and critic must have the same tokenizer.

    python examples/data_preprocess/gsm8k.py --save_dir data/gsm8k
    python examples/ppo_trainer/train_local.py [key=value ...]

The configuration is examples/configs/local_ppo.yaml: put a chat model into models/policy, or set
actor_rollout.model_name_or_path and critic.model_name_or_path. A base model without a chat template needs
`config={"custom_chat_template": ...}` of RLHFDataset for rows that are chats. The same script runs on Ray with
`from verl.trainer.ray_trainer import RayPPOTrainer`.
"""

import sys

from omegaconf import OmegaConf

from verl.data.rlhf_dataset import RLHFDataset
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.utils.tokenizer import hf_tokenizer

CONFIG = "examples/configs/local_ppo.yaml"


def main(overrides: list[str]) -> dict[str, float]:
    """Train; the last metrics."""
    config = OmegaConf.merge(OmegaConf.load(CONFIG), OmegaConf.from_dotlist(overrides))
    tokenizer = hf_tokenizer(config.actor_rollout.model_name_or_path)
    files, limits = list(config.data.train_files), {"max_prompt_length": config.data.max_prompt_length}
    dataset = RLHFDataset(files, tokenizer, limits)
    print(f"{len(dataset)} prompts, the first has {len(dataset[0]['prompt_ids'])} tokens")
    return LocalPPOTrainer(OmegaConf.to_container(config), train_dataset=dataset).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
