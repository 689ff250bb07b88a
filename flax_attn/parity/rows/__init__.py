"""The rows of a report: values, training and optimizers."""
