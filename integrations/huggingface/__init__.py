"""`model.generate(..., cache_impl="paged")`, and a cache of blocks for the decoding loops of transformers."""

from paged_backend.integrations.huggingface.patches import install as install
from paged_backend.integrations.huggingface.patches import release as release
from paged_backend.integrations.huggingface.patches import uninstall as uninstall
