"""What a weight becomes in a step of training."""

from torch import Tensor


def adamw(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The step-th update, from 1, of a weight theta with its moments m and v (arXiv 1711.05101, algorithm 2).

    m' = beta_1 m + (1 - beta_1) g,  v' = beta_2 v + (1 - beta_2) g^2
    theta' = theta - lr (m' / (1 - beta_1^step) / (sqrt(v' / (1 - beta_2^step)) + eps) + decay theta)

    Its fast path, `ops.native.adamw`, works in place on all weights of a model.
    """
    beta1, beta2 = betas
    m = beta1 * exp_avg + (1 - beta1) * grad
    v = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return weight - lr * (m_hat / (v_hat.sqrt() + eps) + decay * weight), m, v
