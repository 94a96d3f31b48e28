"""Takes the place of SGLang's CUDA kernel package, whose import fails without a GPU driver.

On the path the tests take (CPU, ``torch_native`` attention, dense models) SGLang imports some of
its names and calls none. A call is therefore a test set-up error and says so.
"""


class NeedsGpu:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel.{self.name} was called: this engine runs without a GPU")


def __getattr__(name: str) -> NeedsGpu:
    if name.startswith("__"):
        raise AttributeError(name)
    return NeedsGpu(name)
