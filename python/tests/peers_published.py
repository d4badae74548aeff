"""For a failed case of the published test: which of the two results is further off, by a computation in float64."""

import torch

# As the published test compares.
TOLERANCE = 1e-2
NAMES = ("out", "dv", "dk", "dq", "dlog_fgate")


def exact(q, k, v, log_fgate, d_out, seq_start, scale):
    """Output and gradients of v, k, q and the gates by the definition, heads first, float64."""
    q, k, v, gates = x = [a.detach().double().requires_grad_() for a in (q, k, v, log_fgate)]
    m, n = q.shape[2], k.shape[2]
    c = gates.cumsum(-1)
    s = scale * q @ k.mT + c[..., n - m :, None] - c[..., None, :]
    seen = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)[None, None]
    if seq_start is not None:
        seen = seen & (torch.arange(n, device=q.device) >= seq_start[:, None, None, None])
    # A row that sees nothing gives 0.
    weights = s.masked_fill(~seen, -1e300).softmax(-1) * seen
    out = weights @ v
    dq, dk, dv, dgates = torch.autograd.grad(out, x, d_out.double())
    return dict(zip(NAMES, (out.detach(), dv, dk, dq, dgates)))


def judge(local):
    """From the local variables of a failed `test_op`: whether foxlm is within the tolerance everywhere, and nearer to
    float64 than the reference wherever the two differ by more; and a sentence with the largest errors of both."""
    order = [local[name] for name in ("q", "k", "v", "log_fgate", "dout", "seq_start", "sm_scale")]
    errors, right = {}, True
    for name, want in exact(*order).items():
        ours, reference = local[f"tri_{name}"].detach().double(), local[f"ref_{name}"].detach().double()
        far = errors[name] = [(x - want).abs().max().item() for x in (reference, ours)]
        differ = (reference - ours).abs().max().item() > TOLERANCE
        right &= far[1] <= TOLERANCE and (not differ or far[1] < far[0])
    shown = ", ".join(f"{name} {reference:.4f} (foxlm {ours:.4f})" for name, (reference, ours) in errors.items())
    return right, f"largest errors of the float16 reference against float64: {shown}"
