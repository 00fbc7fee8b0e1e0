"""Operations of rewritten code under plain torchax."""
