"""The thorough doctor, in this process."""

from tests.diagnostics.doctor.conftest import doctor

__all__ = ["doctor"]
