"""The first step of an optimizer in closed form: `Prediction.after`.

A third walk over the engine (`walk`) carries what a step does to every tensor (`change`) through
components (`elementwise`, `drawn`) and adds what an optimizer does to each parameter (`rules`),
from the tables (`ends`) to the loss. `sites` is all that knows how the engine keeps its kernels.
Where pairs of tokens are not enough, `neurons` and whole blocks are drawn; `several` makes one step
of many. Every formula has its argument in docs/theory/first-step.md and step-travels.md.
"""
