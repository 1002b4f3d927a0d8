"""One folder per outer system, and nobody else imports its library."""
