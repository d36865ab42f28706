"""Runs with an engine of another library: models that it accepts, reports, and what asynchronous training must show."""

from collections.abc import Sequence
from pathlib import Path

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import make_tiny
from tests.trainer.runs import fit
from verl.trainer.base import StepReport


def model_folder(folder: Path, **models: tuple[str, str | None]) -> Path:
    """The folder of `make_tiny`, with models: name -> (family, size)."""
    make_tiny(folder)
    for name, (family, size) in models.items():
        tiny_model(family, folder / name, seed=0, size=size)
    return folder


def grpo_reports(*settings: str) -> list[StepReport]:
    """The reports of all steps of a run of GRPO."""
    return fit(["algorithm.name=grpo", *settings])[1]


def check_spans(reports: Sequence[StepReport], prompts: int, partial: bool = True) -> None:
    """Every prompt is trained once, and versions are those of the last two pushes before the step.

    Args:
        reports: of all steps.
        prompts: number of prompts per step.
        partial: whether pushes interrupt responses.
    """
    uids = [uid for report in reports for uid in dict.fromkeys(report.batch.non_tensor_batch["uid"])]
    assert len({*uids}) == len(uids) == len(reports) * prompts
    for step, report in enumerate(reports):
        spans = report.batch.non_tensor_batch["weight_versions"]
        for each, oldest in zip(spans, report.batch.batch["weight_version"].tolist(), strict=True):
            versions = [version for _, version in each]
            assert each[0][0] == 0 and versions == sorted({*versions}) and versions[0] == oldest
            assert step - 1 <= oldest and versions[-1] <= step
            assert partial or len(versions) == 1


def turns_agent(max_tokens: int) -> str:
    """The source of an agent of `rollout.mode=server` with three turns. Its score is the share of the letter e.

    Args:
        max_tokens: of each turn.
    """
    return f"""
import openai


async def run(sample, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages, text = [{{"role": "user", "content": "write"}}], ""
    for _ in range(3):
        found = await client.chat.completions.create(model=model, messages=messages, max_tokens={max_tokens})
        text += found.choices[0].message.content
        messages += [found.choices[0].message, {{"role": "user", "content": "more"}}]
    await client.close()
    return text.count("e") / max(len(text), 1)
"""
