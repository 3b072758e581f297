"""The errors a user can cause. Each message says what was declared, what is needed, what was found, and the mend."""


class JaxparError(Exception):
    """The base of every error that jaxpar raises on purpose."""


class PlanError(JaxparError, ValueError):
    """A plan that is not legal for this model, batch or cluster; lists every problem at once."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} with this plan:\n" + "\n".join(f"  - {p}" for p in self.problems))


class ModelError(JaxparError, TypeError):
    """A model that does not follow the protocol of `jaxpar.model`."""


class BatchError(JaxparError, ValueError):
    """A batch whose names, shapes, dtypes or values do not fit the model or the plan."""


class DataError(JaxparError, ValueError):
    """A corpus that cannot be read: missing, empty, or malformed."""


class ConfigError(JaxparError, ValueError):
    """A configuration with an unknown key or an impossible value."""


class CheckpointError(JaxparError, RuntimeError):
    """A checkpoint that cannot be written, read, or that does not fit the model."""


class BackendError(JaxparError, RuntimeError):
    """The installed jax, or the devices at hand, cannot do what is asked."""


class TrainingError(JaxparError, ArithmeticError):
    """A run that no longer learns."""
