"""The quickstart: minutes of training on a CPU, with an encoder and text that need no Hub."""
