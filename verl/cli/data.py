"""Commands on data before a run: `verl data inspect` shows how rows are read, `verl rewards test` what is paid."""

from collections import Counter
from typing import Annotated, Any

import typer

from verl.utils.redaction import console_text

data = typer.Typer(help="Inspect data files.", no_args_is_help=True)
rewards = typer.Typer(help="Try reward functions.", no_args_is_help=True)

_Data = Annotated[str, typer.Argument(metavar="DATA", help="a file, a folder or a dataset of the Hub")]
_Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="keys of `verl train`")]
_SHOWN = 5  # bad rows


def _read(path: str, overrides: list[str] | None) -> tuple[Any, Any]:
    """The configuration with the columns of the data, and its rows."""
    from verl.config.load import read_config
    from verl.config.schema import Config
    from verl.data.columns import check_columns, find_columns
    from verl.data.files import read_rows
    from verl.utils.log import setup_logging

    setup_logging()
    config = read_config(None, [f"data.train_files={path}", *(overrides or [])], schema=Config).config
    rows = read_rows(config.data.train_files, streaming=True)
    section = find_columns(rows, config.data)
    check_columns(rows, section)
    return config.model_copy(update={"data": section}), rows


def _print(*cells: Any) -> None:
    typer.echo(console_text("  ".join(map(str, cells))))


def _print_bad(bad: list[str], count: int) -> None:
    _print(f"bad rows: {len(bad):,} of {count:,}")
    for text in bad[:_SHOWN]:
        _print(" ", text)
    raise typer.Exit(bool(bad))


@data.command("inspect")
def inspect(path: _Data, overrides: _Overrides = None) -> None:
    """Show columns, counts, lengths, the first prompt and bad rows of a file; with model.path=..., in tokens."""
    from verl.trainer.startup.command_line import user_errors

    with user_errors():
        _inspect(path, overrides)


def _inspect(path: str, overrides: list[str] | None) -> None:
    from verl.config.schema import SFTDataConfig
    from verl.data.columns import reward_model
    from verl.data.forms import read_prompt_column
    from verl.data.sft_dataset import _find_columns
    from verl.data.tokenization import encode_prompts, load_tokenizer, read_prompt

    config, rows = _read(path, overrides)
    section, model = config.data, config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model) if model.path else None
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    types, lengths = Counter(), {name: [] for name in (*rows.columns, "prompt in tokens")}
    prompts, bad = [], []
    for index, row in enumerate(rows):
        types.update((name, type(value).__name__) for name, value in row.items() if value is not None)
        for name in rows.columns:
            lengths[name].append(len(str(row[name])))
        try:
            prompt = read_prompt_column(row, section.prompt_key)
            prompts.append(read_prompt(prompt, section.prompt_format, has_template, rows.location(index)))
            reward_model(row, rows.location(index), section.ground_truth_key)
            if tokenizer is not None:
                prompts[-1] = encode_prompts(tokenizer, prompts[-1:], lambda _, i=index: rows.location(i))[0]
                lengths["prompt in tokens"].append(len(prompts[-1]))
        except ValueError as error:
            bad.append(str(error))
    for name, sizes in lengths.items():
        kinds = ", ".join(f"{kind} {count:,}" for (column, kind), count in types.items() if column == name)
        if sizes:
            _print(
                f"{name:<20}", f"length {min(sizes):,} to {max(sizes):,}, mean {sum(sizes) / len(sizes):,.0f} ", kinds
            )
    try:
        _print("sft:", _find_columns(rows, SFTDataConfig()))
    except ValueError as error:
        _print("sft:", error)
    _print("first prompt:", "none" if not prompts else tokenizer.decode(prompts[0]) if tokenizer else prompts[0])
    _print_bad(bad, len(rows))


@rewards.command("test")
def test(path: _Data, overrides: _Overrides = None) -> None:
    """Score right, wrong and empty responses of each data source; list the rows whose ground truth is not read."""
    from verl.trainer.startup.command_line import user_errors

    with user_errors():
        _test(path, overrides)


def _test(path: str, overrides: list[str] | None) -> None:
    from verl.data.columns import data_source, reward_columns, reward_info, reward_model
    from verl.registry import import_module
    from verl.rewards.outcome import BadOutcome, Sample, read_outcome
    from verl.rewards.trial import describe_fault, explain, trial_responses
    from verl.trainer.startup.inputs import load_rewards

    config, rows = _read(path, overrides)
    for address in config.imports:
        import_module(address)
    manager, names, bad, tried = load_rewards(config, None), reward_columns(rows, config.data), [], set()

    def score(row: Any, source: str, texts: list[str]) -> list[tuple[float, dict[str, Any]]]:
        truth = reward_model(row, location, config.data.ground_truth_key)["ground_truth"]
        info = reward_info(row, names)
        prompt = row[config.data.prompt_key]
        samples = [Sample(source, text, truth, info, i, len(texts), prompt=prompt) for i, text in enumerate(texts)]
        outcomes = {i: outcome for i, _, outcome in manager.outcomes(samples)}
        return [read_outcome(outcomes[i]) for i in range(len(texts))]

    for index, row in enumerate(rows):
        location, source = rows.location(index), data_source(row, rows, index, config.data.reward_fn_key)
        try:
            function = manager.compute_score.for_data_source(source)
            if source in tried:
                score(row, source, [""])
                continue
            tried.add(source)
            truth = reward_model(row, location, config.data.ground_truth_key)["ground_truth"]
            kinds = trial_responses(truth, row.get("solution"))
            _print(f"{source}: {function.location}; ground truth {truth!r:.80} ({location})")
            scores = {kind: score(row, source, texts) for kind, texts in kinds.items() if texts}
        except (BadOutcome, ValueError) as error:
            bad.append(f"{location}: {error}")
            continue
        for kind, results in scores.items():
            for text, (value, extra) in zip(kinds[kind], results):
                _print(f"  {kind:<6}{value:>8g}  {text!r:.60}  {explain(function, text, extra)}")
        if fault := describe_fault({kind: [value for value, _ in results] for kind, results in scores.items()}):
            bad.append(f"{location}: the reward {fault}")
    _print_bad(bad, len(rows))
