"""The paper's comparison in miniature: recipes, one runner, and the reports made from its results."""
