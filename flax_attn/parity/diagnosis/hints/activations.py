"""Common activation functions by name."""

import math
from collections.abc import Callable

import numpy as np

Activation = Callable[[np.ndarray], np.ndarray]


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[float])(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def selu(x: np.ndarray) -> np.ndarray:
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


ACTIVATIONS: dict[str, Activation] = {
    "the tanh GELU": gelu_tanh,
    "the exact GELU": lambda x: 0.5 * x * (1 + erf(x / 2**0.5)),
    "the sigmoid GELU": lambda x: x * sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "SiLU": lambda x: x * sigmoid(x),
    "the sigmoid": sigmoid,
    "tanh": np.tanh,
    "softplus": softplus,
    "squared ReLU": lambda x: np.maximum(x, 0) ** 2,
    "ELU": elu,
    "SELU": selu,
    "leaky ReLU (0.01)": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU (0.2)": lambda x: np.where(x > 0, x, 0.2 * x),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "Mish": lambda x: x * np.tanh(softplus(x)),
    "hard SiLU": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "hard sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hard tanh": lambda x: np.clip(x, -1, 1),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "log-sigmoid": lambda x: -np.logaddexp(-x, 0),
    "ELU + 1": lambda x: elu(x) + 1,
    "a square": np.square,
    "an exponential": lambda x: np.exp(np.minimum(x, 700.0)),
}
