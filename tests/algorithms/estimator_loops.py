"""A random batch, and a plain float64 loop for every registered advantage estimator."""

import math

import numpy as np
import torch

from verl.algorithms import bind_arguments, get_adv_estimator_fn

SETTINGS = {"gamma": 0.9, "lam": 0.8, "passk_k": 2, "gdpo_reward_keys": ["acc", "format"]}
SETTINGS |= {"gdpo_reward_weights": [1.0, 0.3], "f_norm": 2.0, "sppo_beta": 1.7}
# samples of one prompt are not adjacent, and groups have different sizes
UID = ["a", "b", "a", "c", "b", "a", "c", "b", "c", "b"]


def make_batch(seed=0, uid=UID, dtype=torch.float64):
    """Columns with random values, masks with gaps (tool output) and padding; NaN wherever the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(uid), 6
    lengths = torch.randint(2, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) > 0.25)
    mask[:, 0] = True

    def column(draw):
        return torch.where(mask, draw(rows, width, generator=generator, dtype=torch.float64), torch.nan).to(dtype)

    return {
        "token_level_rewards": column(torch.randn),
        "response_mask": mask.long(),
        "uid": np.array(uid, dtype=object),
        "values": column(torch.randn),
        "reward_baselines": torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype),
        "old_log_probs": -column(torch.rand),
        "sum_pi_squared": column(torch.rand),
        "rollout_is_weights": column(torch.rand),
        "rm_scores": column(torch.randn),
        "acc": torch.randint(0, 2, (rows,), generator=generator).tolist(),
        "format": np.array(torch.rand(rows, generator=generator).tolist(), dtype=object),
    }


def estimate(name, batch, **settings):
    fn = get_adv_estimator_fn(name)
    return fn(**bind_arguments(fn, batch, {**SETTINGS, **settings}))


# -------------------------------------------------------------------------------- references: plain loops over lists


class Loop:
    """One batch as lists of the tokens of each sample, and the statistics that the references need."""

    def __init__(self, batch):
        self.mask = batch["response_mask"].tolist()
        self.own = [[t for t, on in enumerate(row) if on] for row in self.mask]
        self.uid = list(batch["uid"])
        self.rows = range(len(self.uid))
        self.batch = batch
        self.rewards = self.tokens("token_level_rewards")
        self.reward = [sum(row) for row in self.rewards]
        self.length = [len(row) for row in self.own]

    def tokens(self, name):
        return [[self.batch[name][i, t].item() for t in self.own[i]] for i in self.rows]

    def group(self, i):
        return [j for j in self.rows if self.uid[j] == self.uid[i]]

    def place(self, per_token):
        """Lists over own tokens -> (B, T)."""
        full = torch.zeros(len(self.mask), len(self.mask[0]), dtype=torch.float64)
        for i in self.rows:
            for t, value in zip(self.own[i], per_token[i]):
                full[i, t] = value
        return full

    def repeat(self, per_row):
        return [[per_row[i]] * self.length[i] for i in self.rows]


def mean(xs):
    return sum(xs) / len(xs)


def spread(xs):
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def whiten(per_token):
    flat = [x for row in per_token for x in row]
    return [[(x - mean(flat)) / math.sqrt(spread(flat) ** 2 + 1e-8) for x in row] for row in per_token]


def to_go(row, gamma):
    return [sum(gamma ** (j - i) * row[j] for j in range(i, len(row))) for i in range(len(row))]


def normalised(loop, reward, divide=True):
    found = []
    for i in loop.rows:
        group = [reward[j] for j in loop.group(i)]
        found.append((reward[i] - mean(group)) / (spread(group) + 1e-6 if divide else 1))
    return found


def ref_gae(loop):
    advantages = []
    for rewards, values in zip(loop.rewards, loop.tokens("values")):
        nexts = values[1:] + [0.0]
        deltas = [r + 0.9 * n - v for r, n, v in zip(rewards, nexts, values)]
        advantages.append(to_go(deltas, 0.9 * 0.8))
    returns = [[a + v for a, v in zip(*rows)] for rows in zip(advantages, loop.tokens("values"))]
    return whiten(advantages), returns


def ref_reinforce_plus_plus(loop):
    returns = [to_go(row, 0.9) for row in loop.rewards]
    return whiten(returns), returns


def ref_remax(loop):
    returns = [to_go(row, 1.0) for row in loop.rewards]
    baseline = loop.batch["reward_baselines"].tolist()
    return [[g - baseline[i] for g in returns[i]] for i in loop.rows], returns


def ref_grpo(loop):
    return loop.repeat(normalised(loop, loop.reward))


def ref_grpo_passk(loop):
    found = []
    for i in loop.rows:
        group = [loop.reward[j] for j in loop.group(i)]
        best, second = sorted(group, reverse=True)[:2]
        found.append((best - second) / (spread(group) + 1e-6) if loop.reward[i] == best else 0.0)
    return loop.repeat(found)


def ref_analytic_passk(loop):
    found = []
    for i in loop.rows:
        group = loop.group(i)
        n, wrong = len(group), sum(loop.reward[j] <= 0.5 for j in group)
        passed = 1 - math.comb(wrong, 2) / math.comb(n, 2)
        sigma = math.sqrt(passed * (1 - passed))
        if sigma == 0:
            found.append(0.0)
        elif loop.reward[i] > 0.5:
            found.append((1 - passed) / sigma)
        else:
            found.append((1 - passed - math.comb(wrong - 1, 1) / math.comb(n - 1, 1)) / sigma)
    return loop.repeat(found)


def ref_rloo(loop):
    return loop.repeat([loop.reward[i] - mean([loop.reward[j] for j in loop.group(i) if j != i]) for i in loop.rows])


def ref_opo(loop):
    found = []
    for i in loop.rows:
        total = sum(loop.length[j] for j in loop.group(i))
        found.append(loop.reward[i] - sum(loop.length[j] * loop.reward[j] for j in loop.group(i)) / total)
    return loop.repeat(found)


def ref_gpg(loop):
    centred = normalised(loop, loop.reward, divide=False)
    alpha = len(centred) / sum(abs(a) > 1e-6 for a in centred)
    return loop.repeat([alpha * a / 2 for a in centred])


def ref_reinforce_plus_plus_baseline(loop):
    return whiten(loop.repeat(normalised(loop, loop.reward, divide=False)))


def ref_gdpo(loop):
    parts = [normalised(loop, [float(x) for x in loop.batch[key]]) for key in ("acc", "format")]
    return whiten(loop.repeat([a + 0.3 * b for a, b in zip(*parts)]))


def ref_sppo(loop):
    found = []
    for i in loop.rows:
        softmean = math.log(mean([math.exp(1.7 * loop.reward[j]) for j in loop.group(i)])) / 1.7
        found.append(loop.reward[i] - softmean)
    return loop.repeat(found)


def ref_prime(loop):
    process, parts = loop.tokens("rm_scores"), []
    for i in loop.rows:
        group = loop.group(i)
        n = len(group)
        row = [5 * (n / (n - 1) * r - sum(mean(process[j]) for j in group) / (n - 1)) for r in process[i]]
        row[-1] += 5 * (loop.reward[i] - mean([loop.reward[j] for j in group if j != i]))
        parts.append(row)
    returns = [to_go(row, 1.0) for row in parts]
    return whiten(returns), returns


def token_baseline(loop, step_of):
    """`step_of(i, k)` is the step at which the k-th own token of row i is compared with the others."""
    returns = [to_go(row, 1.0) for row in loop.rewards]
    log_probs, squares = loop.tokens("old_log_probs"), loop.tokens("sum_pi_squared")
    weights = loop.tokens("rollout_is_weights")
    energy = []
    for i in loop.rows:
        steps = [(1 - 2 * math.exp(lp) + s) * w**2 for lp, s, w in zip(log_probs[i], squares[i], weights[i])]
        energy.append([sum(steps[: k + 1]) for k in range(len(steps))])
    advantages = [[0.0] * len(row) for row in returns]
    for i in loop.rows:
        for k in range(loop.length[i]):
            here = [
                (returns[j][q], energy[j][q])
                for j in loop.group(i)
                for q in range(loop.length[j])
                if step_of(j, q) == step_of(i, k)
            ]
            baseline = sum(g * w for g, w in here) / (sum(w for _, w in here) + 1e-8)
            advantages[i][k] = returns[i][k] - (baseline if len(here) > 1 else 0)
    return advantages, returns


REFERENCES = {name.removeprefix("ref_"): fn for name, fn in globals().items() if name.startswith("ref_")}
REFERENCES |= {
    "grpo_vectorized": ref_grpo,
    "rloo_vectorized": ref_rloo,
    "optimal_token_baseline": lambda loop: token_baseline(loop, lambda i, k: loop.own[i][k]),
    "tir_optimal_token_baseline": lambda loop: token_baseline(loop, lambda i, k: k),
}
