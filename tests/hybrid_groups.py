"""The groups of ranks of the 3D-HybridEngine (Sheng et al. 2024, arXiv 2409.19256, section 5), and their formula.

Training splits a model p-t-d (pipeline, tensor, data parallel); generation on the same ranks splits it p_g-t_g, which
makes d_g = p t / (p_g t_g) replicas inside of every training replica. A micro-data-parallel group has the d_g ranks
whose training shards together are one generation shard.

    groups = HybridGroups(pp=1, tp=4, dp=2, generation_pp=1, generation_tp=2)
    groups.rank_groups("generation_tp")     # [[0, 2], [1, 3], [4, 6], [5, 7]]
    groups.rank_groups("micro_dp")          # [[0, 1], [2, 3], [4, 5], [6, 7]]

Generation groups take ranks at a stride of t/t_g (p/p_g), so that the training shard of every rank lies inside of its
generation shard: nothing is stored twice, and a rank gathers only within its micro-data-parallel group. The vanilla
grouping takes consecutive ranks; some ranks then have disjoint shards.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Kind = Literal["tp", "pp", "dp", "generation_tp", "generation_pp", "micro_dp"]


@dataclass(frozen=True)
class HybridGroups:
    """The layout of training and generation over the same ranks.

    Ranks are numbered as by megatron-core: rank (P d + D) t + T has the pipeline rank P, the data-parallel rank D and
    the tensor-parallel rank T. Ranks that share the tokens of a sequence count as data-parallel.

    Args:
        pp, tp, dp: sizes in training.
        generation_pp, generation_tp: sizes in generation; they divide pp and tp.
        strided: the grouping of the paper; False: the vanilla one.

    Raises:
        ValueError: a size of generation does not divide that of training.
    """

    pp: int
    tp: int
    dp: int
    generation_pp: int
    generation_tp: int
    strided: bool = True

    def __post_init__(self) -> None:
        for name, size, training_size in (
            ("pipeline", self.generation_pp, self.pp),
            ("tensor", self.generation_tp, self.tp),
        ):
            if size < 1 or training_size < 1 or training_size % size:
                raise ValueError(
                    f"{name}-parallel size of generation: expected a divisor of that of training, {training_size}, "
                    f"found {size}"
                )

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def stride(self) -> int:
        """Distance of two ranks of a tensor-parallel group of generation."""
        return self.tp // self.generation_tp if self.strided else 1

    def training(self, rank: int) -> tuple[int, int, int]:
        """(P, T, D): pipeline, tensor and data-parallel rank in training."""
        stage, inside = divmod(rank, self.dp * self.tp)
        return stage, inside % self.tp, inside // self.tp

    def generation(self, rank: int) -> tuple[int, int, int]:
        """(P_g, T_g, micro-data-parallel rank) in generation, inside of the training replica."""
        stage, tensor, _ = self.training(rank)
        if not self.strided:
            micro, inside = divmod(stage * self.tp + tensor, self.generation_pp * self.generation_tp)
            return inside // self.generation_tp, inside % self.generation_tp, micro
        stages, tensors = self.pp // self.generation_pp, self.tp // self.generation_tp
        return stage // stages, tensor // tensors, stage % stages * tensors + tensor % tensors

    def rank_groups(self, kind: Kind) -> list[list[int]]:
        """All groups of one kind, by their first rank."""
        groups: dict[tuple[int, ...], list[int]] = {}
        in_training = {"tp": (2, 0), "pp": (2, 1), "dp": (0, 1)}
        in_generation = {"generation_tp": (2, 0), "generation_pp": (2, 1), "micro_dp": (0, 1)}
        for rank in range(self.world_size):
            training = self.training(rank)
            if kind in in_training:
                key = tuple(training[i] for i in in_training[kind])
            else:
                generation = self.generation(rank)
                key = training[2], *(generation[i] for i in in_generation[kind])
            groups.setdefault(key, []).append(rank)
        return sorted(groups.values())

    @property
    def communication(self) -> Fraction:
        """What a rank receives in the transition to generation, relative to the bytes of the model (table 2).

        Vanilla grouping gathers the whole model inside of the training replica.
        """
        cells, size = self.pp * self.tp, self.generation_pp * self.generation_tp
        return Fraction(cells - size, size * cells) if self.strided else Fraction(cells - 1, cells)
