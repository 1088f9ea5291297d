"""`python -m spotlights`: the `spotlights` command."""

from spotlights.cli import app

if __name__ == "__main__":
    app()
