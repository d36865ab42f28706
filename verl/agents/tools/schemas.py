"""The schema of a tool in the form of OpenAI's function calling, and the response of a tool."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a function, in JSON schema."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function, in JSON schema."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function: name, description and parameters."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as the chat template receives it."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def for_template(self) -> dict[str, Any]:
        """The schema as a dict, without fields that were not given."""
        return {"type": self.type, **self.model_dump(exclude_unset=True, exclude_none=True)}


class ToolResponse(BaseModel):
    """The response of a tool. Only text is supported.

    Args:
        text: the text that the policy reads.
        image, video: not supported; a tool that returns one fails.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether there is neither text nor media."""
        return not (self.text or self.image or self.video)
