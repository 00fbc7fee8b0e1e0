"""What happens to one ATen op."""
