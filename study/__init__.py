"""The paper's comparison in small: recipes, a runner, and reports of their results."""
