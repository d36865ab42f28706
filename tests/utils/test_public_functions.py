"""Functions that exist for scripts of public verl: tensors, files, metrics, timers, tokenizers, scores, batches."""

import math

import numpy as np
import pytest
import torch

from verl import DataProto
from verl.algorithms import torch_functional as functional
from verl.rewards import public_scores
from verl.trainer.ppo import batch_functions, public_functions
from verl.utils import balance, device, public


def test_masked_statistics_with_an_axis():
    values, mask = torch.tensor([[1.0, 2, 9], [4, 9, 9]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert functional.masked_sum(values, mask, axis=-1).tolist() == [3, 4]
    assert functional.masked_mean(values, mask, axis=-1).tolist() == [1.5, 4]
    assert functional.masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert functional.clip_by_value(values, torch.tensor(2.0), 4).tolist() == [[2, 2, 4], [4, 4, 4]]


def test_masks_and_positions():
    ids = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 8], [3, 2, 2, 2]])
    assert functional.get_response_mask(ids).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert functional.get_response_mask(ids, [2, 3], torch.bool).tolist()[2] == [True, False, False, False]
    assert functional.compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist() == [
        [0, 0, 0, 1],
        [0, 1, 2, 2],
    ]


def test_log_probs():
    logits, labels = torch.tensor([[[0.0, math.log(3)]]]), torch.tensor([[1]])
    assert functional.logprobs_from_logits(logits, labels).item() == pytest.approx(math.log(0.75))
    assert functional.entropy_from_logits(logits).item() == pytest.approx(0.562335, abs=1e-6)


def test_padding():
    ids = torch.tensor([[1, 2, 3]])
    assert functional.pad_sequence_to_length(ids, 5, 0).tolist() == [[1, 2, 3, 0, 0]]
    assert functional.pad_sequence_to_length(ids, 5, 9, left_pad=True).tolist() == [[9, 9, 1, 2, 3]]
    assert functional.pad_sequence_to_length(ids, 2, 0) is not None and ids.tolist() == [[1, 2, 3]]
    assert functional.pad_2d_list_to_length([[1], [2, 3]], 0, 3).tolist() == [[1, 0, 0], [2, 3, 0]]


@pytest.mark.parametrize(("how", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_truncation(how, kept):
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    found, mask = functional.postprocess_data(ids, torch.ones_like(ids), 3, 0, truncation=how)
    assert found.tolist() == [kept] and mask.tolist() == [[1, 1, 1]]
    padded, mask = functional.postprocess_data(ids, torch.ones_like(ids), 6, 7)
    assert padded.tolist() == [[7, 1, 2, 3, 4, 5]] and mask.tolist() == [[0, 1, 1, 1, 1, 1]]
    with pytest.raises(ValueError, match="expected at most 3 tokens, found 5"):
        functional.postprocess_data(ids, torch.ones_like(ids), 3, 0)


def test_dicts_metrics_and_timers():
    lists = {"a": [1]}
    public.append_to_dict(lists, {"a": 2, "b": 3})
    public.append_to_dict(lists, {"b": 4}, prefix="actor/")
    assert lists == {"a": [1, 2], "b": [3], "actor/b": [4]}
    reduced = public.reduce_metrics({"loss": [1.0, 3.0], "len/max": [1, 5], "len/min": [2, 1], "lr": 0.5})
    assert reduced == {"loss": 2.0, "len/max": 5, "len/min": 1, "lr": 0.5}
    with pytest.raises(ValueError, match="'a' is 1 in one dict and 2 in the other"):
        public.union_two_dict({"a": 1}, {"a": 2})
    timing = {}
    for _ in range(2):
        with public.marked_timer("gen", timing, color="red"):
            pass
    assert set(timing) == {"gen"} and timing["gen"] > 0


def test_balanced_groups():
    lengths = [8, 1, 1, 6]
    groups = balance.get_seqlen_balanced_partitions(lengths, k_partitions=2, equal_size=True)
    assert sorted(i for group in groups for i in group) == [0, 1, 2, 3]
    assert balance.log_seqlen_unbalance(lengths, groups, "seqlen") == {
        "seqlen/min": 7,
        "seqlen/max": 9,
        "seqlen/minmax_diff": 2,
        "seqlen/balanced_min": 7,
        "seqlen/balanced_max": 9,
        "seqlen/mean": 8,
    }
    assert balance.get_reverse_idx([2, 0, 1]) == [1, 2, 0] and balance.ceildiv(7, 2) == 4


def test_devices():
    available = torch.cuda.is_available()
    assert device.is_cuda_available is available and device.is_npu_available is False
    assert device.get_device_name() == ("cuda" if available else "cpu")
    assert device.get_torch_device() is (torch.cuda if available else torch.cpu)


def test_local_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("1")
    public.makedirs(tmp_path / "b" / "c")
    assert public.copy(str(tmp_path / "a"), str(tmp_path / "b" / "c")) and public.exists(tmp_path / "b" / "c" / "x.txt")
    public.copy(str(tmp_path / "a" / "x.txt"), str(tmp_path / "y.txt"))
    assert (tmp_path / "y.txt").read_text() == "1"
    assert public.copy_to_local("Qwen/Qwen3-8B", use_shm=True) == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", ["exists", "makedirs", "copy_to_local"])
def test_addresses_of_other_file_systems(name):
    with pytest.raises(OSError, match="hdfs://n/f: expected a local path"):
        getattr(public, name)("hdfs://n/f")


def test_scores():
    assert public_scores.gsm8k_score("so 6*7=42\n#### 42", "42") == 1.0
    assert public_scores.gsm8k_score("#### 41", "42", format_score=0.1) == 0.1
    assert public_scores.gsm8k_score("forty", "42", format_score=0.1) == 0.0
    assert public_scores.gsm8k_number("#### 1,000") == "1000"
    assert public_scores.math_score(r"so \boxed{\frac{1}{2}}", "1/2") == 1.0
    assert public_scores.last_box(r"a \boxed{x^{2}} b") == r"\boxed{x^{2}}"
    assert public_scores.inside_box(r"\boxed{x^{2}}") == "x^{2}"


# ---- batches --------------------------------------------------------------------------------------------------------


def batch() -> DataProto:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    return DataProto.from_dict(
        {
            "prompts": torch.ones(2, 2, dtype=torch.long),
            "responses": torch.ones(2, 3, dtype=torch.long),
            "attention_mask": torch.cat([torch.tensor([[0, 1], [1, 1]]), mask], 1),
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
            "old_log_probs": torch.full((2, 3), -1.0),
            "ref_log_prob": torch.full((2, 3), -1.5),
        },
        {"uid": ["a", "a"]},
    )


def test_the_steps_of_a_trainer():
    from verl.algorithms.core_algos import AdvantageEstimator, FixedKLController

    data = batch()
    data.batch["response_mask"] = batch_functions.compute_response_mask(data)
    assert data.batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    same, metrics = batch_functions.apply_kl_penalty(data, FixedKLController(0.2))
    assert same is data and metrics == {"actor/reward_kl_penalty": 0.5, "actor/reward_kl_penalty_coeff": 0.2}
    expected = [[-0.1, 0.9, 0.0], [-0.1, -0.1, -0.1]]
    assert np.allclose(data.batch["token_level_rewards"].tolist(), expected)
    batch_functions.compute_advantage(data, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False)
    # rewards 0.8 and -0.3, less their mean 0.25
    assert np.allclose(data.batch["advantages"].tolist(), [[0.55, 0.55, 0], [-0.55, -0.55, -0.55]])
    assert data.batch["returns"].shape == (2, 3)
    del data.batch["response_mask"]  # it is computed
    batch_functions.compute_advantage(data, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False)
    assert np.allclose(data.batch["advantages"].tolist(), [[0.55, 0.55, 0], [-0.55, -0.55, -0.55]])
    found = batch_functions.compute_data_metrics(data, use_critic=False)
    assert found["critic/score/mean"] == 0.5 and found["response_length/mean"] == 2.5
    # one of two responses and prompts fills its columns
    assert found["response_length/clip_ratio"] == found["prompt_length/clip_ratio"] == 0.5
    del data.non_tensor_batch["uid"]  # a batch without groups
    assert found == batch_functions.compute_data_metrics(data) | {"reward/tied_groups": found["reward/tied_groups"]}


def test_timings_and_throughput():
    timing = {"gen": 2.0, "adv": 1.0, "step": 4.0}
    found = batch_functions.compute_timing_metrics(batch(), timing)
    assert found["timing_s/step"] == 4.0
    assert found["timing_per_token_ms/gen"] == 2000 / 5 and found["timing_per_token_ms/adv"] == 1000 / 8
    empty = batch()
    empty.batch["attention_mask"] = torch.zeros_like(empty.batch["attention_mask"])
    assert batch_functions.compute_timing_metrics(empty, timing)["timing_per_token_ms/gen"] == 2000
    assert batch_functions.compute_throughout_metrics(batch(), timing, n_gpus=2) == {
        "perf/total_num_tokens": 8,
        "perf/time_per_step": 4.0,
        "perf/throughput": 1.0,
    }


# ---- what trainers of recipes copy ----------------------------------------------------------------------------------


def test_validation_metrics_of_samples():
    bootstrap = public_functions.bootstrap_metric([1.0, 1.0], 2, [np.max, lambda values: len(values)])
    assert bootstrap == [(1.0, 0.0), (2.0, 0.0)]
    votes = [{"pred": p, "val": v} for p, v in (("a", 0.9), ("b", 0.8), ("a", 0.7))]
    assert public_functions.calc_maj_val(votes, "pred", "val") == 0.9
    columns = {"score": [0.0, 1.0, 0.5], "text": ["x", "y", "z"], "acc": [None, 1.0, None]}
    found = public_functions.process_validation_metrics(["d", "d", "e"], ["p", "p", "q"], columns)
    assert found["e"] == {"score": {"mean@1": 0.5}} and found["d"]["acc"] == {"mean@1": 1.0}
    score = found["d"]["score"]  # the best of two draws of 0 and 1 is 1 in three of four cases
    assert (score["mean@2"], score["std@2"]) == (0.5, 0.5)
    assert score["best@2/mean"] == pytest.approx(0.75, abs=0.04) and score["worst@2/mean"] == pytest.approx(
        0.25, abs=0.04
    )
    seven = public_functions.process_validation_metrics(
        ["d"] * 7, ["p"] * 7, {"score": [1.0] * 7, "pred": list("aabbccc")}
    )
    ns = {name.partition("@")[2] for name in seven["d"]["score"] if name.startswith("maj@")}
    assert ns == {f"{n}/{kind}" for n in (2, 4, 7) for kind in ("mean", "std")}


@pytest.mark.parametrize(
    ("options", "count"), [({}, 3), ({"num_batches_divided_by": 2}, 4), ({"min_num_micro_batch": 5}, 5)]
)
def test_micro_batches_of_at_most_so_many_tokens(options, count):
    lengths = [6, 5, 4, 3, 3, 2]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    batch = DataProto.from_dict({"attention_mask": mask, "x": torch.arange(6)}, {"uid": np.array(list("abcdef"))})
    parts, rows = public_functions.prepare_dynamic_batch(batch, 8, **options)
    assert len(parts) == count and sorted(row for each in rows for row in each) == list(range(6))
    assert all(sum(lengths[row] for row in each) <= 8 for each in rows)
    assert [part.non_tensor_batch["uid"].tolist() for part in parts] == [
        ["abcdef"[row] for row in each] for each in rows
    ]
    merged = torch.cat([part.batch["x"] for part in parts])
    assert public_functions.restore_dynamic_batch(merged, rows).tolist() == list(range(6))
    with pytest.raises(ValueError, match="expected at least the 6 columns of the batch, found 5"):
        public_functions.prepare_dynamic_batch(batch, 5)


def test_how_far_two_policies_are_apart():
    log_probs = {"old_log_probs": [[0.5, 0.2, 0.9]], "rollout_log_probs": [[0.4, 0.4, 0.1]]}
    tensors = {name: torch.tensor(values).log() for name, values in log_probs.items()}
    tensors |= {"response_mask": torch.tensor([[1, 1, 0]]), "responses": torch.ones(1, 3, dtype=torch.long)}
    name = "training/rollout_probs_diff_"
    batch = DataProto.from_dict(tensors)
    found = public_functions.calculate_debug_metrics(batch)
    assert found[name + "valid"] == 1 and found[name + "max"] == pytest.approx(0.2)
    assert found[name + "mean"] == pytest.approx(0.15) and found[name + "std"] == pytest.approx(0.1 / 2**0.5)
    settings = {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_rs": None}
    batch, metrics = public_functions.compute_rollout_correction_and_add_to_batch(batch, settings)
    assert batch.batch["rollout_is_weights"][0, :2].tolist() == pytest.approx([1.2, 0.5])  # 1.25 is cut
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0]] and "rollout_corr/kl" in metrics
    batch.batch["response_mask"] = torch.zeros(1, 3, dtype=torch.long)
    assert public_functions.calculate_debug_metrics(batch)[name + "valid"] == 0
