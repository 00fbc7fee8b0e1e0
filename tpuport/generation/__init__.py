"""Text generation of transformers as two programs: one for the prompt, one for all new tokens."""
