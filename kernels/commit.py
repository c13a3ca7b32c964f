"""Move the accepted path's cache rows to the end of the committed prefix, in all layers at once."""

import torch

from .cache_write import slots


def reference(storage, pages, prefix, path, accept_lens, page_size):
    """Copy logical rows prefix + path[k] to prefix + k for k < accept_lens.

    Args:
        storage: [layers, planes, slots, G, W], changed in place; pages: [B, NP] int32; prefix: [B] int64.
        path: [B, P] ascending node indices, path[k] >= k; accept_lens: [B].
    """
    k = torch.arange(path.shape[1], device=path.device)
    keep = k < accept_lens[:, None]
    target = torch.where(keep, prefix[:, None] + k, -1)  # -1: the scratch row
    source = torch.where(keep, prefix[:, None] + path, -1)
    src, dst = (slots(x, pages, page_size).view(-1) for x in (source, target))
    storage[:, :, dst] = storage[:, :, src]  # the right side is a copy: the whole path is read before any store
