"""Linear projection with optional bias and residual: fp32 accumulation, rounded once."""


def reference(x, weight, bias=None, residual=None):
    """x [N, I], weight [O, I], bias [O], residual [N, O] -> [N, O] in x's dtype."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)
