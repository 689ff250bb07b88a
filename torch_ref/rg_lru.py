"""Griffin's recurrent block, one token after another, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class RGLRU(nn.Module):
    """`h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x'_t` between a gelu gate; segments `*B T`."""

    def __init__(self, in_features, num_heads, *, width=None, conv_size=4):
        super().__init__()
        width = width or in_features
        assert width % num_heads == 0, f"width {width}, {num_heads} heads"
        block = width // num_heads
        self.linear_y = nn.Linear(in_features, width)
        self.linear_x = nn.Linear(in_features, width)
        self.conv_1d = nn.Conv1d(width, width, conv_size, groups=width)
        self.input_gate_weight = nn.Parameter(torch.randn(num_heads, block, block))
        self.input_gate_bias = nn.Parameter(torch.randn(num_heads, block))
        self.recurrent_gate_weight = nn.Parameter(torch.randn(num_heads, block, block))
        self.recurrent_gate_bias = nn.Parameter(torch.randn(num_heads, block))
        self.recurrent_param = nn.Parameter(torch.randn(width))
        self.linear_out = nn.Linear(width, in_features)

    def forward(self, x, segments=None):
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        z = self.convolved(self.linear_x(x), starts)  # *B T W
        starts[..., 0] = True
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        i = self.gate(z, self.input_gate_weight, self.input_gate_bias)  # *B T W
        r = self.gate(z, self.recurrent_gate_weight, self.recurrent_gate_bias)  # *B T W
        a = (-8 * r * F.softplus(self.recurrent_param.to(wide))).exp()  # *B T W
        first = starts.unsqueeze(-1)  # *B T 1
        added = i * z.to(wide) * torch.where(first, 1, (1 - a**2).sqrt())  # *B T W
        h, outputs = torch.zeros_like(added[..., 0, :]), []
        for t in range(x.shape[-2]):
            h = torch.where(first[..., t, :], 0, a[..., t, :] * h) + added[..., t, :]  # *B W
            outputs.append(h)
        context = torch.stack(outputs, dim=-2).to(x.dtype)  # *B T W
        return self.linear_out(context * F.gelu(self.linear_y(x), approximate="tanh"))  # *B T D

    def gate(self, z, weight, bias):
        """A sigmoid of z, mixed inside blocks."""
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        blocks = z.unflatten(-1, bias.shape).to(wide)  # *B T N w
        mixed = torch.einsum("...nw,nwv->...nv", blocks, weight.to(wide))  # *B T N w
        return (mixed + bias).sigmoid().flatten(-2)  # *B T W

    def convolved(self, x, starts):
        """Each component's sum over the last tokens of its document."""
        weight, document = self.conv_1d.weight[:, 0], starts.cumsum(-1)  # W K, *B T
        out = x * weight[:, -1] + self.conv_1d.bias
        for back in range(1, min(weight.shape[-1], x.shape[-2])):
            same = document[..., back:] == document[..., :-back]  # *B T-back
            before = F.pad(x[..., :-back, :] * same.unsqueeze(-1), (0, 0, back, 0))  # *B T W
            out = out + before * weight[:, -1 - back]
        return out
