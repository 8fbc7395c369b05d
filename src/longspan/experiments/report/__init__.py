"""One HTML file about some training runs."""
