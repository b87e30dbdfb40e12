// Prints what AsyncAPI's own parser finds wrong with the document on standard input, a line for each error.
import { readFileSync } from "node:fs";
import { Parser } from "@asyncapi/parser";

for (const each of await new Parser().validate(readFileSync(0, "utf8"))) {
  if (each.severity === 0) console.log(`${each.path.join(".")}: ${each.message}`);
}
