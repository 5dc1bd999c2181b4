"""Finding attention: from Softmax up to the score product and down to the value product."""

from graphsurgery.attention.finder import Findings, find_attention
from graphsurgery.attention.site import Dims, Link, NotAttention, Refusal, RefusedSite, Site

__all__ = ["Dims", "Findings", "Link", "NotAttention", "Refusal", "RefusedSite", "Site", "find_attention"]
