"""`python -m heliograph demo`: a training on handwritten digits that is killed and resumed."""
