"""Integrations with third-party trainers; each module requires the library that it is named after."""
