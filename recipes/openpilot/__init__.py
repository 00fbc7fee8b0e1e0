"""Fine-tuning of openpilot's driving models from real logs, on TPU. For research only."""
