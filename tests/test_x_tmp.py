import jax, jax.numpy as jnp, pytest
from flax import nnx
def test_batch():
    from pagedjax.models.batch import AttentionBatch
    i = jnp.int32
    b = AttentionBatch(jnp.zeros(4,i), jnp.zeros(4,i), jnp.zeros((2,3),i), jnp.zeros(3,i), jnp.zeros(2,i))
    @jax.jit
    def f(b): return b
    f(b)
    jax.tree.map(lambda x: None, b)
    jax.tree.map(lambda x: object(), b)
    jax.tree_util.tree_structure(b)
    jax.eval_shape(f, b)
    with pytest.raises(Exception) as e:
        AttentionBatch(jnp.zeros(4,i), jnp.zeros(5,i), jnp.zeros((2,3),i), jnp.zeros(3,i), jnp.zeros(2,i))
    print(type(e.value), e.value)
def test_nnx():
    class M(nnx.Module):
        def __init__(self, rngs): self.l = nnx.Linear(3,4,rngs=rngs)
        def __call__(self, x): return self.l(x)
    m = M(nnx.Rngs(0)); g, s = nnx.split(m)
    jax.jit(lambda s, x: nnx.merge(g, s)(x))(s, jnp.zeros((2,3), jnp.float32))
