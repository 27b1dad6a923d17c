"""Tables and figures as pages and files."""
