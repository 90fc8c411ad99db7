"""Operations with a reference, a native, a Triton and a CUDA implementation each; one folder an operation."""
