"""MaxText's Llama, beside MaxText's own policies of recomputation."""

import pathlib
import tempfile
from typing import Any

import flax.linen as nn
import jax
import maxtext
import optax
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.utils import maxtext_utils

from tests.zoo.plain_transformers import tokens
from tests.zoo.program import Program, Remat

_POLICIES = ("full", "save_qkv_proj", "save_out_proj", "minimal_with_context")


def maxtext_llama(toy: bool) -> Program:
    """Llama of MaxText, its layers scanned, its policies by name."""
    layers, width, batch, length = (2, 32, 1, 32) if toy else (6, 256, 4, 256)
    size = dict(batch=batch, length=length, vocabulary=256 if toy else 8192)

    def net_of(policy: str) -> Any:
        base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
        config = pyconfig.initialize(
            ["maxtext", str(base)], run_name="others", base_output_directory=tempfile.gettempdir(),
            skip_jax_distributed_system=True, enable_checkpointing=False, hardware="cpu",
            dataset_type="synthetic", enable_goodput_recording=False, log_config=False,
            decoder_block="llama2", base_emb_dim=width, base_num_query_heads=8,
            base_num_kv_heads=4, base_mlp_dim=4 * width, base_num_decoder_layers=layers,
            head_dim=width // 8, vocab_size=size["vocabulary"], max_target_length=length,
            per_device_batch_size=batch, attention="dot_product", dtype="float32",
            weight_dtype="float32", scan_layers=True, remat_policy=policy,
        )  # fmt: skip
        mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        return models.transformer_as_linen(config, mesh, None), mesh

    batch_ = tokens(size)
    text = batch_[:, :-1]
    places = jax.lax.broadcasted_iota(text.dtype, text.shape, 1)
    net, mesh = net_of("full")
    keys = {name: jax.random.key(0) for name in ("params", "dropout", "aqt")}
    with mesh:
        params = nn.unbox(net.init(keys, text, places, enable_dropout=False))

    def with_policy(policy: str) -> Any:
        net, _ = net_of(policy)

        def loss(params: Any, batch: Any, places: Any) -> Any:
            logits = net.apply(params, batch[:, :-1], places, enable_dropout=False)
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, batch[:, 1:]
            ).mean()

        return loss

    def build(remat: Remat) -> Any:
        return with_policy("none")

    ways = {f"authors: {policy}": with_policy(policy) for policy in _POLICIES}
    return Program(build, (params, batch_, places), by_hand=False, ways=ways)
