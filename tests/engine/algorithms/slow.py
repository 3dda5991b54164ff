"""Independent references: loops over Python floats, written from the papers. They never read a masked slot."""

import math


def steps(mask_row):
    """The unmasked slots of a row."""
    return [r for r, on in enumerate(mask_row) if on]


def clamp(x, low, high):
    return max(low, min(high, x))


def gae(rewards, values, mask, gamma, lam):
    advantages = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        slots = steps(row)
        for i, r in enumerate(slots):
            # eq. 16 of the paper as the sum it is, not as a recursion.
            total = 0.0
            for k in range(i, len(slots)):
                following = values[b][slots[k + 1]] if k + 1 < len(slots) else 0.0
                delta = rewards[b][slots[k]] + gamma * following - values[b][slots[k]]
                total += (gamma * lam) ** (k - i) * delta
            advantages[b][r] = total
    return advantages


def members(group_ids, n):
    return [i for i, g in enumerate(group_ids) if g == group_ids[n]]


def grpo(scores, group_ids, scale):
    result = []
    for n, score in enumerate(scores):
        group = [scores[i] for i in members(group_ids, n)]
        mean = math.fsum(group) / len(group)
        if scale == "none":
            result.append(score - mean)
            continue
        degrees = len(group) - (1 if scale == "sample" else 0)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / degrees)
        result.append(0.0 if max(group) == min(group) else (score - mean) / (std + 1e-6))
    return result


def rloo(scores, group_ids):
    result = []
    for n, score in enumerate(scores):
        others = [scores[i] for i in members(group_ids, n) if i != n]
        result.append(score - math.fsum(others) / len(others))
    return result


def opo(scores, group_ids, lengths):
    result = []
    for n, score in enumerate(scores):
        group = members(group_ids, n)
        tokens = sum(lengths[i] for i in group)
        result.append(score - math.fsum(lengths[i] * scores[i] for i in group) / tokens)
    return result


def whiten(values, mask):
    flat = [values[b][r] for b, row in enumerate(mask) for r in steps(row)]
    if not flat:
        return [[0.0] * len(row) for row in mask]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(values[b][r] - mean) / math.sqrt(variance + 1e-8) if on else 0.0 for r, on in enumerate(row)]
            for b, row in enumerate(mask)]


def weights(mask, aggregation, max_tokens):
    tokens = sum(map(sum, mask))
    sequences = sum(any(row) for row in mask)
    result = []
    for row in mask:
        share = {"token": 1 / max(tokens, 1), "sequence": 1 / (max(sequences, 1) * max(sum(row), 1)),
                 "constant": 1 / (max(sequences, 1) * max_tokens)}[aggregation]
        result.append([share if on else 0.0 for on in row])
    return result


def token_objective(kind, logprob, ratio, advantage, clip):
    """What one token adds to the objective; clip: (low, high, dual or None)."""
    low, high, dual = clip
    bounded = clamp(ratio, 1 - low, 1 + high)
    if kind == "reinforce":
        return advantage * logprob
    if kind == "weight_clip":
        return bounded * advantage * logprob
    objective = min(ratio * advantage, bounded * advantage)
    return max(objective, dual * advantage) if dual is not None and advantage < 0 else objective


def policy_loss(kind, tokens, mask, weights, clip):
    """Scalar loss of a whole batch; tokens: (logprobs, old_logprobs, advantages)."""
    logprobs, old, advantages = tokens
    total = 0.0
    for b, row in enumerate(mask):
        slots = steps(row)
        gaps = {r: logprobs[b][r] - old[b][r] for r in slots}
        for r in slots:
            gap = math.fsum(gaps.values()) / len(slots) if kind == "sequence_clip" else gaps[r]
            total -= weights[b][r] * token_objective(kind, logprobs[b][r], math.exp(gap), advantages[b][r], clip)
    return total


def value_loss(values, old, returns, mask, clip):
    flat = [(values[b][r], old[b][r], returns[b][r]) for b, row in enumerate(mask) for r in steps(row)]
    total = 0.0
    for v, o, g in flat:
        errors = [(v - g) ** 2]
        if clip is not None:
            errors.append((o + clamp(v - o, -clip, clip) - g) ** 2)
        total += 0.5 * max(errors)
    return total / max(len(flat), 1)


def kl(estimator, logprob, ref):
    d = logprob - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def sft_loss(logprobs, mask):
    flat = [logprobs[b][r] for b, row in enumerate(mask) for r in steps(row)]
    return -math.fsum(flat) / max(len(flat), 1)


def bradley_terry_loss(pairs, margin, centering):
    losses = [-log_sigmoid(c - r - margin) + centering * (c + r) ** 2 for c, r in pairs]
    return math.fsum(losses) / len(losses)


def dpo_loss(pairs, beta, smoothing):
    """pairs: (chosen, rejected, ref_chosen, ref_rejected) sequence logprobs."""
    total = 0.0
    for chosen, rejected, ref_chosen, ref_rejected in pairs:
        lead = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
        total -= (1 - smoothing) * log_sigmoid(lead) + smoothing * log_sigmoid(-lead)
    return total / len(pairs)


def ipo_loss(pairs, beta):
    errors = [((c - rc) - (r - rr) - 1 / (2 * beta)) ** 2 for c, r, rc, rr in pairs]
    return math.fsum(errors) / len(errors)
