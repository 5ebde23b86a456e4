"""The section `verl` of a recipe: the cluster that `tepo verl` runs it on."""

from pydantic import Field

from tepo.config.base import Section


class VerlConfig(Section):
    """How verl spreads a run over GPUs. Read by `tepo verl` alone; `tepo train` runs on one device."""

    nodes: int = Field(1, ge=1, description="machines of the Ray cluster")
    gpus_per_node: int = Field(8, ge=1)
    tensor_parallel: int = Field(1, ge=1, description="GPUs that one vLLM engine is spread over")
    sequence_parallel: int = Field(1, ge=1, description="GPUs that share one sequence in training (Ulysses)")
    offload: bool = Field(False, description="keep weights and optimizer state in the machine's memory between uses")
    overrides: list[str] = Field(
        default_factory=list, description="further `key=value` of verl's own configuration, put last"
    )
