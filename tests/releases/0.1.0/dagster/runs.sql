BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('29b539ebc72a');
CREATE TABLE backfill_tags (
	id INTEGER NOT NULL, 
	backfill_id VARCHAR(255), 
	"key" TEXT, 
	value TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE bulk_actions (
	id INTEGER NOT NULL, 
	"key" VARCHAR(32) NOT NULL, 
	status VARCHAR(255) NOT NULL, 
	timestamp TIMESTAMP NOT NULL, 
	body TEXT, 
	action_type VARCHAR(32), 
	selector_id TEXT, 
	job_name TEXT, 
	PRIMARY KEY (id), 
	UNIQUE ("key")
);
CREATE TABLE daemon_heartbeats (
	id INTEGER NOT NULL, 
	daemon_type VARCHAR(255) NOT NULL, 
	daemon_id VARCHAR(255), 
	timestamp TIMESTAMP NOT NULL, 
	body TEXT, 
	PRIMARY KEY (id), 
	UNIQUE (daemon_type)
);
CREATE TABLE instance_info (
	id INTEGER NOT NULL, 
	run_storage_id TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE kvs (
	id INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	value TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE run_tags (
	id INTEGER NOT NULL, 
	run_id VARCHAR(255), 
	"key" TEXT, 
	value TEXT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id) ON DELETE CASCADE
);
INSERT INTO "run_tags" VALUES(1,'d8d0f5e3-e23c-4078-a7e7-dbaa55376b5e','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(2,'d8d0f5e3-e23c-4078-a7e7-dbaa55376b5e','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(3,'d8d0f5e3-e23c-4078-a7e7-dbaa55376b5e','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(4,'b93706fe-823d-48c0-ab78-07ffbee223ca','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(5,'b93706fe-823d-48c0-ab78-07ffbee223ca','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(6,'b93706fe-823d-48c0-ab78-07ffbee223ca','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(7,'f2052e6a-efea-485f-9ac6-dd7b8e9a1e86','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(8,'f2052e6a-efea-485f-9ac6-dd7b8e9a1e86','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(9,'f2052e6a-efea-485f-9ac6-dd7b8e9a1e86','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(10,'f2052e6a-efea-485f-9ac6-dd7b8e9a1e86','dagster/partition','2026-11-24');
INSERT INTO "run_tags" VALUES(11,'f2052e6a-efea-485f-9ac6-dd7b8e9a1e86','dagster/partition_set','archive_day_partition_set');
INSERT INTO "run_tags" VALUES(12,'8c665ea7-43a8-4428-ace3-3d7105575136','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(13,'8c665ea7-43a8-4428-ace3-3d7105575136','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(14,'8c665ea7-43a8-4428-ace3-3d7105575136','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(15,'8c665ea7-43a8-4428-ace3-3d7105575136','dagster/partition','2026-11-25');
INSERT INTO "run_tags" VALUES(16,'8c665ea7-43a8-4428-ace3-3d7105575136','dagster/partition_set','reconcile_day_partition_set');
INSERT INTO "run_tags" VALUES(17,'0f154d40-268e-49c3-97d7-96558993de11','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(18,'0f154d40-268e-49c3-97d7-96558993de11','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(19,'0f154d40-268e-49c3-97d7-96558993de11','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(20,'0f154d40-268e-49c3-97d7-96558993de11','dagster/partition','2026-11-25');
INSERT INTO "run_tags" VALUES(21,'0f154d40-268e-49c3-97d7-96558993de11','dagster/partition_set','archive_day_partition_set');
INSERT INTO "run_tags" VALUES(22,'0f154d40-268e-49c3-97d7-96558993de11','dagster/failure_reason','STEP_FAILURE');
INSERT INTO "run_tags" VALUES(23,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(24,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(25,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','outbox/job','relay_session');
INSERT INTO "run_tags" VALUES(26,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','dagster/max_retries','0');
INSERT INTO "run_tags" VALUES(27,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(28,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','outbox/shard','0');
INSERT INTO "run_tags" VALUES(29,'87473f75-947d-4535-b7d5-17d169f6008c','outbox/package','outbox_pipelines');
INSERT INTO "run_tags" VALUES(30,'87473f75-947d-4535-b7d5-17d169f6008c','outbox/name','outbox');
INSERT INTO "run_tags" VALUES(31,'87473f75-947d-4535-b7d5-17d169f6008c','outbox/job','relay_session');
INSERT INTO "run_tags" VALUES(32,'87473f75-947d-4535-b7d5-17d169f6008c','dagster/max_retries','0');
INSERT INTO "run_tags" VALUES(33,'87473f75-947d-4535-b7d5-17d169f6008c','.dagster/repository','__repository__@outbox');
INSERT INTO "run_tags" VALUES(34,'87473f75-947d-4535-b7d5-17d169f6008c','outbox/shard','0');
CREATE TABLE runs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(255), 
	snapshot_id VARCHAR(255), 
	pipeline_name TEXT, 
	mode TEXT, 
	status VARCHAR(63), 
	run_body TEXT, 
	partition TEXT, 
	partition_set TEXT, 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	update_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	start_time FLOAT, 
	end_time FLOAT, 
	backfill_id VARCHAR(255), 
	PRIMARY KEY (id), 
	UNIQUE (run_id), 
	CONSTRAINT fk_runs_snapshot_id_snapshots_snapshot_id FOREIGN KEY(snapshot_id) REFERENCES snapshots (snapshot_id)
);
INSERT INTO "runs" VALUES(1,'d8d0f5e3-e23c-4078-a7e7-dbaa55376b5e','f5b100ca11d77be7c76a1ccbf3602d300ec7fe98','relay_once',NULL,'SUCCESS','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": {"__frozenset__": []}, "execution_plan_snapshot_id": "ca85aeb6c6d03d35bf8ec8703e86794bcbf976ce", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": null, "pipeline_code_origin": null, "pipeline_name": "relay_once", "pipeline_snapshot_id": "f5b100ca11d77be7c76a1ccbf3602d300ec7fe98", "root_run_id": null, "run_config": {"ops": {"relay_shard": {"config": {"shard": 0, "until_empty": true}}}}, "run_id": "d8d0f5e3-e23c-4078-a7e7-dbaa55376b5e", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.SUCCESS"}, "step_keys_to_execute": ["relay_shard"], "tags": {".dagster/repository": "__repository__@outbox", "outbox/name": "outbox", "outbox/package": "outbox_pipelines"}}',NULL,NULL,'2026-11-28 20:16:58.812692','2026-11-28 20:17:00.696234',1.79589701885578489305e+09,1.79589702069623398782e+09,NULL);
INSERT INTO "runs" VALUES(2,'b93706fe-823d-48c0-ab78-07ffbee223ca','f5b100ca11d77be7c76a1ccbf3602d300ec7fe98','relay_once',NULL,'SUCCESS','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": {"__frozenset__": []}, "execution_plan_snapshot_id": "ca85aeb6c6d03d35bf8ec8703e86794bcbf976ce", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": null, "pipeline_code_origin": null, "pipeline_name": "relay_once", "pipeline_snapshot_id": "f5b100ca11d77be7c76a1ccbf3602d300ec7fe98", "root_run_id": null, "run_config": {"ops": {"relay_shard": {"config": {"shard": 1, "until_empty": true}}}}, "run_id": "b93706fe-823d-48c0-ab78-07ffbee223ca", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.SUCCESS"}, "step_keys_to_execute": ["relay_shard"], "tags": {".dagster/repository": "__repository__@outbox", "outbox/name": "outbox", "outbox/package": "outbox_pipelines"}}',NULL,NULL,'2026-11-28 20:17:00.764172','2026-11-28 20:17:02.409405',1.79589702077695608133e+09,1.79589702240940499305e+09,NULL);
INSERT INTO "runs" VALUES(3,'f2052e6a-efea-485f-9ac6-dd7b8e9a1e86','7cb7b80f90f9f0999af639ed1f8cff7852adb112','archive_day',NULL,'SUCCESS','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": {"__frozenset__": []}, "execution_plan_snapshot_id": "28b2e0f5206d0e0bc281330d20609b535e5fa2f4", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": {"__class__": "TimeWindowPartitionsSubset", "included_time_windows": [{"__class__": "TimeWindow", "end": {"__class__": "TimestampWithTimezone", "timestamp": 1795564800.0, "timezone": "UTC"}, "start": {"__class__": "TimestampWithTimezone", "timestamp": 1795478400.0, "timezone": "UTC"}}], "num_partitions": 1, "partitions_def": {"__class__": "TimeWindowPartitionsDefinition", "cron_schedule": "0 0 * * *", "end": null, "end_offset": 0, "exclusions": null, "fmt": "%Y-%m-%d", "start": {"__class__": "TimestampWithTimezone", "timestamp": 1767225600.0, "timezone": "UTC"}, "timezone": "UTC"}}, "pipeline_code_origin": null, "pipeline_name": "archive_day", "pipeline_snapshot_id": "7cb7b80f90f9f0999af639ed1f8cff7852adb112", "root_run_id": null, "run_config": {}, "run_id": "f2052e6a-efea-485f-9ac6-dd7b8e9a1e86", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.SUCCESS"}, "step_keys_to_execute": ["outbox__archive", "check_archived_day", "outbox__archive_archive_equals_table"], "tags": {".dagster/repository": "__repository__@outbox", "dagster/partition": "2026-11-24", "dagster/partition_set": "archive_day_partition_set", "outbox/name": "outbox", "outbox/package": "outbox_pipelines"}}','2026-11-24','archive_day_partition_set','2026-11-28 20:17:05.265954','2026-11-28 20:17:40.465957',1.79589702583447504043e+09,1.79589706046595692628e+09,NULL);
INSERT INTO "runs" VALUES(4,'8c665ea7-43a8-4428-ace3-3d7105575136','8837645b201768651dc51664e06db125eb1bf140','reconcile_day',NULL,'SUCCESS','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": {"__frozenset__": []}, "execution_plan_snapshot_id": "b9c8bc591e48999b9f160ca198aa746d782850ef", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": {"__class__": "TimeWindowPartitionsSubset", "included_time_windows": [{"__class__": "TimeWindow", "end": {"__class__": "TimestampWithTimezone", "timestamp": 1795651200.0, "timezone": "UTC"}, "start": {"__class__": "TimestampWithTimezone", "timestamp": 1795564800.0, "timezone": "UTC"}}], "num_partitions": 1, "partitions_def": {"__class__": "TimeWindowPartitionsDefinition", "cron_schedule": "0 0 * * *", "end": null, "end_offset": 0, "exclusions": null, "fmt": "%Y-%m-%d", "start": {"__class__": "TimestampWithTimezone", "timestamp": 1767225600.0, "timezone": "UTC"}, "timezone": "UTC"}}, "pipeline_code_origin": null, "pipeline_name": "reconcile_day", "pipeline_snapshot_id": "8837645b201768651dc51664e06db125eb1bf140", "root_run_id": null, "run_config": {}, "run_id": "8c665ea7-43a8-4428-ace3-3d7105575136", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.SUCCESS"}, "step_keys_to_execute": ["outbox__reconciliation.reconcile_events", "outbox__reconciliation.reconcile_read[?]", "outbox__reconciliation.reconcile_slices", "outbox__reconciliation.reconcile_compare[?]", "outbox__reconciliation.reconcile_aggregates", "outbox__reconciliation.reconcile_order[?]", "outbox__reconciliation.reconcile_report"], "tags": {".dagster/repository": "__repository__@outbox", "dagster/partition": "2026-11-25", "dagster/partition_set": "reconcile_day_partition_set", "outbox/name": "outbox", "outbox/package": "outbox_pipelines"}}','2026-11-25','reconcile_day_partition_set','2026-11-28 20:17:45.503461','2026-11-28 20:17:52.234275',1795897065.54789,1.79589707223427510257e+09,NULL);
INSERT INTO "runs" VALUES(5,'0f154d40-268e-49c3-97d7-96558993de11','7cb7b80f90f9f0999af639ed1f8cff7852adb112','archive_day',NULL,'FAILURE','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": {"__frozenset__": []}, "execution_plan_snapshot_id": "28b2e0f5206d0e0bc281330d20609b535e5fa2f4", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": {"__class__": "TimeWindowPartitionsSubset", "included_time_windows": [{"__class__": "TimeWindow", "end": {"__class__": "TimestampWithTimezone", "timestamp": 1795651200.0, "timezone": "UTC"}, "start": {"__class__": "TimestampWithTimezone", "timestamp": 1795564800.0, "timezone": "UTC"}}], "num_partitions": 1, "partitions_def": {"__class__": "TimeWindowPartitionsDefinition", "cron_schedule": "0 0 * * *", "end": null, "end_offset": 0, "exclusions": null, "fmt": "%Y-%m-%d", "start": {"__class__": "TimestampWithTimezone", "timestamp": 1767225600.0, "timezone": "UTC"}, "timezone": "UTC"}}, "pipeline_code_origin": null, "pipeline_name": "archive_day", "pipeline_snapshot_id": "7cb7b80f90f9f0999af639ed1f8cff7852adb112", "root_run_id": null, "run_config": {}, "run_id": "0f154d40-268e-49c3-97d7-96558993de11", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.FAILURE"}, "step_keys_to_execute": ["outbox__archive", "check_archived_day", "outbox__archive_archive_equals_table"], "tags": {".dagster/repository": "__repository__@outbox", "dagster/failure_reason": "STEP_FAILURE", "dagster/partition": "2026-11-25", "dagster/partition_set": "archive_day_partition_set", "outbox/name": "outbox", "outbox/package": "outbox_pipelines"}}','2026-11-25','archive_day_partition_set','2026-11-28 20:18:02.421862','2026-11-28 20:18:03.283531',1.79589708280252695086e+09,1.79589708328353095051e+09,NULL);
INSERT INTO "runs" VALUES(6,'3e7d4b73-7ac3-414b-b283-f7d1a15235c8','0e1cf3ab5452695d0d4cdf92c64c27a5e673126c','relay_session',NULL,'FAILURE','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": null, "execution_plan_snapshot_id": "60011f979dda3e95bea77904f3b07571385180f0", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": null, "pipeline_code_origin": null, "pipeline_name": "relay_session", "pipeline_snapshot_id": "0e1cf3ab5452695d0d4cdf92c64c27a5e673126c", "root_run_id": null, "run_config": {"ops": {"relay_shard": {"config": {"shard": 0}}}}, "run_id": "3e7d4b73-7ac3-414b-b283-f7d1a15235c8", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.FAILURE"}, "step_keys_to_execute": ["relay_shard"], "tags": {".dagster/repository": "__repository__@outbox", "dagster/max_retries": "0", "outbox/job": "relay_session", "outbox/name": "outbox", "outbox/package": "outbox_pipelines", "outbox/shard": "0"}}',NULL,NULL,'2026-11-28 20:18:04.626039','2026-11-28 20:18:04.706563',NULL,1.79589708470656299593e+09,NULL);
INSERT INTO "runs" VALUES(7,'87473f75-947d-4535-b7d5-17d169f6008c','0e1cf3ab5452695d0d4cdf92c64c27a5e673126c','relay_session',NULL,'FAILURE','{"__class__": "PipelineRun", "asset_check_selection": null, "asset_selection": null, "execution_plan_snapshot_id": "60011f979dda3e95bea77904f3b07571385180f0", "external_pipeline_origin": null, "has_repository_load_data": false, "mode": null, "parent_run_id": null, "partitions_subset": null, "pipeline_code_origin": null, "pipeline_name": "relay_session", "pipeline_snapshot_id": "0e1cf3ab5452695d0d4cdf92c64c27a5e673126c", "root_run_id": null, "run_config": {"ops": {"relay_shard": {"config": {"shard": 0}}}}, "run_id": "87473f75-947d-4535-b7d5-17d169f6008c", "run_op_concurrency": null, "solid_selection": null, "solids_to_execute": null, "status": {"__enum__": "PipelineRunStatus.FAILURE"}, "step_keys_to_execute": ["relay_shard"], "tags": {".dagster/repository": "__repository__@outbox", "dagster/max_retries": "0", "outbox/job": "relay_session", "outbox/name": "outbox", "outbox/package": "outbox_pipelines", "outbox/shard": "0"}}',NULL,NULL,'2026-11-28 20:18:04.963014','2026-11-28 20:18:05.043717',NULL,1.79589708504371690749e+09,NULL);
CREATE TABLE secondary_indexes (
	id INTEGER NOT NULL, 
	name VARCHAR(512), 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	migration_completed DATETIME, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "secondary_indexes" VALUES(1,'run_partitions','2026-11-28 20:16:49','2026-11-28 20:16:49.331806');
INSERT INTO "secondary_indexes" VALUES(2,'run_repo_label_tags','2026-11-28 20:16:49','2026-11-28 20:16:49.357447');
INSERT INTO "secondary_indexes" VALUES(3,'bulk_action_types','2026-11-28 20:16:49','2026-11-28 20:16:49.375794');
INSERT INTO "secondary_indexes" VALUES(4,'run_backfill_id','2026-11-28 20:16:49','2026-11-28 20:16:49.393784');
INSERT INTO "secondary_indexes" VALUES(5,'backfill_job_name_and_tags','2026-11-28 20:16:49','2026-11-28 20:16:49.415667');
INSERT INTO "secondary_indexes" VALUES(6,'backfill_end_timestamp','2026-11-28 20:16:49','2026-11-28 20:16:49.442377');
INSERT INTO "secondary_indexes" VALUES(7,'run_start_end_overwritten','2026-11-28 20:16:49','2026-11-28 20:16:49.499501');
CREATE TABLE snapshots (
	id INTEGER NOT NULL, 
	snapshot_id VARCHAR(255) NOT NULL, 
	snapshot_body BLOB NOT NULL, 
	snapshot_type VARCHAR(63) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (snapshot_id)
);
CREATE INDEX idx_bulk_actions_status ON bulk_actions (status);
CREATE INDEX idx_bulk_actions_selector_id ON bulk_actions (selector_id);
CREATE INDEX idx_bulk_actions ON bulk_actions ("key");
CREATE INDEX idx_bulk_actions_action_type ON bulk_actions (action_type);
CREATE INDEX idx_backfill_tags_backfill_id ON backfill_tags (backfill_id, id);
CREATE UNIQUE INDEX idx_kvs_keys_unique ON kvs ("key");
CREATE INDEX idx_runs_by_job ON runs (pipeline_name, id);
CREATE INDEX idx_run_range ON runs (status, update_timestamp, create_timestamp);
CREATE INDEX idx_runs_by_backfill_id ON runs (backfill_id, id);
CREATE INDEX idx_run_status ON runs (status);
CREATE INDEX idx_run_partitions ON runs (partition_set, partition);
CREATE INDEX idx_run_tags ON run_tags ("key", value);
CREATE INDEX idx_run_tags_run_idx ON run_tags (run_id, id);
COMMIT;
